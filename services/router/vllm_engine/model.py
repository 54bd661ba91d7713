"""What the engine service tells of the model: facts of its files, and the tokenizer's files."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splitwave.text.model_files import ModelFiles

BUNDLED_NAMES = {
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
BUNDLED_SUFFIXES = {".jinja", ".model", ".tiktoken"}
CHUNK_BYTES = 64 * 1024
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Facts of a model directory."""

    directory: Path
    model_type: str
    architectures: tuple[str, ...]
    bos_token_id: int
    pad_token_id: int

    @classmethod
    def read(cls, directory: Path) -> "EngineModel":
        """Read config.json, or raise ModelDirectoryError."""
        config = ModelFiles.read(directory).config
        listed = config.get("architectures")
        return cls(
            directory=directory,
            model_type=str(config.get("model_type", "")),
            architectures=tuple(map(str, listed)) if isinstance(listed, list) else (),
            bos_token_id=_id(config.get("bos_token_id")),
            pad_token_id=_id(config.get("pad_token_id")),
        )


class TokenizerBundle:
    """The tokenizer's files as one zip archive, made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making: asyncio.Future[bytes] | None = None

    async def chunks(self) -> Iterator[tuple[bytes, str]]:
        """The archive in pieces; the last one has its SHA-256 in hex, the others none."""
        if self._making is None:
            self._making = asyncio.ensure_future(asyncio.to_thread(archive, self._directory))
        data = await asyncio.shield(self._making)  # A caller that leaves takes nobody's archive.
        return _pieces(data)


def archive(directory: Path) -> bytes:
    """A zip of the tokenizer's files, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in sorted(directory.iterdir()):
            if path.name in BUNDLED_NAMES or path.suffix in BUNDLED_SUFFIXES:
                entry = zipfile.ZipInfo(path.name, _ZIP_TIME)
                entry.compress_type = zipfile.ZIP_DEFLATED
                bundle.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def _pieces(data: bytes) -> Iterator[tuple[bytes, str]]:
    for start in range(0, len(data), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(data)
        digest = hashlib.sha256(data).hexdigest() if last else ""
        yield data[start : start + CHUNK_BYTES], digest


def _id(value: object) -> int:
    """A token id of config.json; 0 if there is none, as the message has no way to say so."""
    return value if isinstance(value, int) else 0
