"""SHA-256 of each weight file, remembered by size, times and inode."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

FRESH_S = 2.0
"""A file that changed so lately may change again within its timestamps' grain: not remembered."""
READERS_MAX = 8
NEUTRAL_SUFFIXES = (".md", ".txt.license", ".png", ".jpg", ".lock", ".incomplete")
NEUTRAL_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
"""What no engine reads."""


class ChangedWhileRead(OSError):
    """A weight file changed while its digest was made: its engines may have loaded either."""


class WeightsCache:
    """Digests by path, each with the state that the file had; kept in one JSON file.

    `path` None keeps nothing between processes.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[object]] = {}
        if path is not None:
            with suppress(OSError, ValueError):
                found = json.loads(path.read_bytes())
                if isinstance(found, dict):
                    self._known = found

    def get(self, path: Path, state: list[int]) -> str | None:
        """The digest of a file in this state, if it is known."""
        known = self._known.get(str(path))
        if isinstance(known, list) and known[:-1] == state and isinstance(known[-1], str):
            return known[-1]
        return None

    def put(self, path: Path, state: list[int], digest: str) -> None:
        """Remember a digest."""
        self._known[str(path)] = [*state, digest]

    def save(self) -> None:
        """Write what is known, whole or not at all; a cache that cannot be kept is no error."""
        if self._path is None:
            return
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._known, sort_keys=True), encoding="utf-8")
            part.replace(self._path)


def default_cache_path() -> Path:
    """Where this user's digests are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "splitwave" / "weights.json"


def weights_manifest(model_path: Path, cache: WeightsCache) -> dict[str, str]:
    """SHA-256 by file of a model directory, hidden files and what no engine reads left out.

    Raises OSError for a file that cannot be read whole (ChangedWhileRead among it), and if there
    is none.
    """
    paths = {
        str(path.relative_to(model_path)): path
        for path in sorted(model_path.rglob("*"))
        if path.is_file() and _counts(path.relative_to(model_path))
    }
    if not paths:
        raise FileNotFoundError(f"{model_path} holds no file of a model")
    with ThreadPoolExecutor(min(READERS_MAX, len(paths))) as readers:
        digests = list(readers.map(lambda path: _digest(path.resolve(), cache), paths.values()))
    cache.save()
    return dict(zip(paths, digests, strict=True))


def _counts(relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not (
        hidden or relative.name.endswith(NEUTRAL_SUFFIXES) or relative.name in NEUTRAL_NAMES
    )


def _digest(path: Path, cache: WeightsCache) -> str:
    before = _state(path)
    if (known := cache.get(path, before)) is not None:
        return known
    digest = sha256_of(path)
    if _state(path) != before:
        raise ChangedWhileRead(f"{path} changed while its digest was made; start again")
    changed_at_s = max(before[1:3]) / 1e9
    if time.time() - changed_at_s > FRESH_S:
        cache.put(path, before, digest)
    return digest


def sha256_of(path: Path) -> str:
    """The digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> list[int]:
    """Size, times of change of content and of status, inode and device."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
