"""What the environment switches on in an engine's processes.

| variable | values | effect |
|---|---|---|
| SPLITWAVE_FORK | 1 | CPU: fork engines from the imported parent, their worker in-process |
| SPLITWAVE_NIXL_PROGRESS_THREAD | 0 | NIXL starts no progress thread, which spins on a core each |
| SPLITWAVE_WAVE_EPOCH | a number | ranks report to the coordinator of this epoch of their group |
| SPLITWAVE_FAULTS | names, comma between | tests break one thing on purpose (`Fault`) |

They are read where they act, in each process, since spawned processes inherit only the environment.
"""

import enum
import os
from collections.abc import Mapping

FORK = "SPLITWAVE_FORK"
NIXL_PROGRESS_THREAD = "SPLITWAVE_NIXL_PROGRESS_THREAD"
WAVE_EPOCH = "SPLITWAVE_WAVE_EPOCH"
FAULTS = "SPLITWAVE_FAULTS"


class Fault(enum.StrEnum):
    """One thing that a test breaks on purpose, to see that its check can fail."""

    NO_RELEASE = "no_release"
    """Prefill: a release is accepted and forgotten; blocks stay until the lease ends."""
    NO_BYTES = "no_bytes"
    """Decode: bytes of a pull are not counted, as if none had moved."""
    NO_REMOTE_COUNT = "no_remote_count"
    """Decode: all prompt tokens count as held by prefill, the token it sampled included."""
    SLOW_PULLS = "slow_pulls"
    """Decode: a transfer is reported as finished a second late."""
    NO_PULSE = "no_pulse"
    """Worker: a rank that a signal has stopped is waited for, however long."""
    DROP_FENCE = "drop_fence"
    """Decode worker: a pull is not confirmed with prefill. Read by the worker, not by an engine."""
    STOCK_COORDINATOR = "stock_coordinator"
    """The group's waves are vLLM's own coordinator's, and its ranks report nothing."""
    DROP_WAKES = "drop_wakes"
    """Coordinator: each start of a wave is thrown away, but for the watchdog's."""


def fork_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if engines are to be forked and to run their worker in-process."""
    return _flag(FORK, "0", environ)


def nixl_progress_thread_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if NIXL may start its progress thread (its default)."""
    return _flag(NIXL_PROGRESS_THREAD, "1", environ)


def wave_epoch(environ: Mapping[str, str] = os.environ) -> int | None:
    """The epoch in which ranks report; None if their coordinator is vLLM's own."""
    value = environ.get(WAVE_EPOCH)
    return None if value is None else int(value)


def fault(name: Fault, environ: Mapping[str, str] = os.environ) -> bool:
    """True if a test asked for this fault. Raises ValueError for a name that is none."""
    given = [word.strip() for word in environ.get(FAULTS, "").split(",") if word.strip()]
    if unknown := set(given) - set(Fault):
        known = ", ".join(Fault)
        raise ValueError(f"{FAULTS} names {', '.join(sorted(unknown))}; it knows {known}")
    return name in given


def _flag(name: str, default: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, default)
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}; set it to 0 or 1")
    return value == "1"
