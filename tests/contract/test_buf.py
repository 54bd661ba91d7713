"""The contract is commented and compatible, its code fresh; each check can fail."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gen import generate

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "proto/baseline.binpb"
COMMENTED_FIELD = re.compile(r"(?:^ *//[^\n]*\n)+(?P<field>^ +(?:\w+ )?[\w.]+ \w+ = \d+;\n)", re.M)


def buf(*arguments: str) -> str:
    """Run buf, which needs no network for this; return what it complains of."""
    tool = Path(sys.executable).with_name("buf")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    complaints = done.stdout + done.stderr
    assert done.returncode == 0 or complaints, f"buf ended with {done.returncode} and no word"
    return complaints


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the proto module, to be spoiled."""
    return shutil.copytree(ROOT / "proto", tmp_path / "proto")


def spoil(proto: Path, replacement: str) -> None:
    """Replace the first commented field of the prefill service's file, comment and all."""
    path = proto / "splitwave/v1alpha1/prefill_service.proto"
    text, count = COMMENTED_FIELD.subn(replacement, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


def test_the_contract_is_well_formed_and_commented() -> None:
    assert buf("lint", str(ROOT / "proto")) == ""


def test_the_contract_is_formatted() -> None:
    assert buf("format", "--diff", "--exit-code", str(ROOT / "proto")) == ""


def test_the_contract_breaks_no_released_peer() -> None:
    assert buf("breaking", str(ROOT / "proto"), "--against", str(BASELINE)) == ""


def test_a_field_without_a_comment_is_found(copied: Path) -> None:
    spoil(copied, r"\g<field>")

    assert "should have a non-empty comment" in buf("lint", str(copied))


def test_a_removed_field_is_found(copied: Path) -> None:
    spoil(copied, "")

    complaints = buf("breaking", str(copied), "--against", str(BASELINE))

    assert re.search(r"Previously present field .* was deleted", complaints), complaints


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    checked_in = sorted((ROOT / "splitwave/v1alpha1").glob("*_pb2*"))

    fresh = generate(tmp_path / "v1alpha1")

    assert [path.name for path in fresh] == [path.name for path in checked_in], "run `make gen`"
    for new, old in zip(fresh, checked_in, strict=True):
        assert new.read_text() == old.read_text(), f"{old.name} is stale: run `make gen`"


def test_stale_generated_code_is_found(tmp_path: Path) -> None:
    removed = tmp_path / "removed_pb2.py"
    removed.write_text("")

    fresh = generate(tmp_path)

    assert not removed.exists()
    assert fresh
