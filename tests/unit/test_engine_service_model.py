"""The tokenizer's files as the engine service sends them, and what it reads of a model."""

import hashlib
import io
import random
import zipfile
from pathlib import Path

import pytest

from services.router.vllm_engine.model import CHUNK_BYTES, EngineModel, TokenizerBundle, archive
from splitwave.engine.sim import write_vocabulary


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(random.Random(1).randbytes(3 * CHUNK_BYTES))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


async def test_a_large_archive_comes_in_pieces_and_only_the_last_has_its_digest(
    directory: Path,
) -> None:
    pieces = list(await TokenizerBundle(directory).chunks())

    data = b"".join(piece for piece, _ in pieces)
    assert len(pieces) == 4
    assert max(len(piece) for piece, _ in pieces) == CHUNK_BYTES
    assert [digest for _, digest in pieces] == ["", "", "", hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        assert "tokenizer.model" in bundle.namelist()
        assert "model.safetensors" not in bundle.namelist()


def test_the_same_files_give_the_same_archive(directory: Path) -> None:
    first = archive(directory)
    (directory / "tokenizer.json").touch()

    assert archive(directory) == first


def test_a_model_that_says_little_has_no_types_and_no_pad_token(directory: Path) -> None:
    model = EngineModel.read(directory)

    assert (model.model_type, model.architectures) == ("", ())
    assert (model.bos_token_id, model.pad_token_id) == (257, 0)
