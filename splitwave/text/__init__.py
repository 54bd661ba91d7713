"""Text at the router: tokens, chat templates, stop strings. Pools see token ids only."""

from splitwave.text.chat import ChatOptions, ChatTemplate
from splitwave.text.completion import TextDelta, TextOptions, TextStream
from splitwave.text.detokenizer import Detokenizer
from splitwave.text.model_files import ModelDirectoryError
from splitwave.text.stop import StopStrings
from splitwave.text.tokenizer import Tokenizer

__all__ = [
    "ChatOptions",
    "ChatTemplate",
    "Detokenizer",
    "ModelDirectoryError",
    "StopStrings",
    "TextDelta",
    "TextOptions",
    "TextStream",
    "Tokenizer",
]
