"""Text at the router: tokenizing, detokenizing and stop strings. Pools see token ids only."""

from splitwave.text.completion import TextDelta, TextOptions, TextStream
from splitwave.text.detokenizer import Detokenizer
from splitwave.text.model_files import ModelDirectoryError
from splitwave.text.stop import StopStrings
from splitwave.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "ModelDirectoryError",
    "StopStrings",
    "TextDelta",
    "TextOptions",
    "TextStream",
    "Tokenizer",
]
