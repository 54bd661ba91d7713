"""What the environment switches on in an engine's processes.

| variable | values | effect |
|---|---|---|
| SPLITWAVE_FORK | 1 | CPU: fork engines from the imported parent, their worker in-process |
| SPLITWAVE_FORK | 0 | GPU: spawn engines, which are forked otherwise |
| SPLITWAVE_NIXL_PROGRESS_THREAD | 0 | NIXL starts no progress thread, which spins on a core each |
| SPLITWAVE_WAVE_EPOCH | a number | ranks report to the coordinator of this epoch of their group |
| SPLITWAVE_PROBE | 1 | `splitwave certify` may look into a running engine, and break it |
| SPLITWAVE_WORST_TOKEN | v2, legacy | GPU: whole decode steps as graphs over this transport |
| SPLITWAVE_HANDOVERS | 1 | GPU: eager microbatches wait within a bound, and fail together |
| SPLITWAVE_COLLECTIVE_MARKS | 0 | GPU: the device does not count the collectives that have ended |
| SPLITWAVE_COLLECTIVE_TIMEOUT_S | seconds | GPU: a rank that waits longer reports and ends (30) |
| SPLITWAVE_WEDGE_DIR | a directory | GPU: where such reports are left; a group sets its own |
| SPLITWAVE_MODE | a mode | what steps of another kind than its own are violations of |
| SPLITWAVE_FAULTS | names, comma between | tests break one thing on purpose (`Fault`) |

They are read where they act, in each process, since spawned processes inherit only the environment.
"""

import enum
import os
from collections.abc import Mapping

FORK = "SPLITWAVE_FORK"
NIXL_PROGRESS_THREAD = "SPLITWAVE_NIXL_PROGRESS_THREAD"
WAVE_EPOCH = "SPLITWAVE_WAVE_EPOCH"
WORST_TOKEN = "SPLITWAVE_WORST_TOKEN"
HANDOVERS = "SPLITWAVE_HANDOVERS"
COLLECTIVE_MARKS = "SPLITWAVE_COLLECTIVE_MARKS"
COLLECTIVE_TIMEOUT = "SPLITWAVE_COLLECTIVE_TIMEOUT_S"
COLLECTIVE_TIMEOUT_S = 30.0
WEDGE_DIR = "SPLITWAVE_WEDGE_DIR"
PROBE = "SPLITWAVE_PROBE"
MODE = "SPLITWAVE_MODE"
FAULTS = "SPLITWAVE_FAULTS"
RESTARTS = "SPLITWAVE_RESTARTS"
"""Not a switch: how often the worker has started over (splitwave.runtime.again)."""


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
    LONG_STEPS = "long_steps"
    """Prefill: a step with a long prompt in it computes for seconds, as on a slow CPU."""
    NO_STEP_POLLS = "no_step_polls"
    """Prefill: without NIXL's progress thread, nobody polls it while a step computes."""
    NO_PULSE = "no_pulse"
    """Worker: a rank that a signal has stopped is waited for, however long."""
    DROP_FENCE = "drop_fence"
    """Decode worker: a pull is not confirmed with prefill. Read by the worker, not by an engine."""
    STOCK_COORDINATOR = "stock_coordinator"
    """The group's waves are vLLM's own coordinator's, and its ranks report nothing."""
    SHIFT_ROUTING = "shift_routing"
    """A token goes to the experts after those that its router chose."""
    OUT_OF_MODE_STEP = "out_of_mode_step"
    """Each rank runs one step outside its mode, amid its work: compiled code is passed by. An eager
    rank has no other way to run; its step is counted as `planted`. Not after a start over."""
    DROP_WAKES = "drop_wakes"
    """Coordinator: each start of a wave is thrown away, but for the watchdog's."""
    POISON_PADDING = "poison_padding"
    """GPU: what lies past the received rows is filled with NaN and valid expert ids."""
    NO_SANITISE = "no_sanitise"
    """GPU, transport v2: rows past the received ones are taken for received."""
    SHARED_BUFFER = "shared_buffer"
    """GPU, transport legacy: graphs of all sizes share one buffer."""
    NO_DRAIN = "no_drain"
    """GPU, transport legacy: a host-synced dispatch does not wait for replays before it."""


def fork_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if engines are to be forked and to run their worker in-process."""
    return _flag(FORK, "0", environ)


def nixl_progress_thread_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if NIXL may start its progress thread (its default)."""
    return _flag(NIXL_PROGRESS_THREAD, "1", environ)


def probing_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the battery may look into this engine, and break it."""
    return _flag(PROBE, "0", environ)


def worst_token_transport(environ: Mapping[str, str] = os.environ) -> str | None:
    """The transport that decode graphs dispatch over; None where steps are not worst-token ones."""
    value = environ.get(WORST_TOKEN)
    if value not in (None, "v2", "legacy"):
        raise ValueError(f"{WORST_TOKEN} is {value!r}; set it to v2 or legacy")
    return value


def handovers_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if microbatch threads are to wait for each other within a bound, and fail together."""
    return _flag(HANDOVERS, "0", environ)


def collective_marks_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the device counts the collectives that have ended."""
    return _flag(COLLECTIVE_MARKS, "1", environ)


def collective_timeout_s(environ: Mapping[str, str] = os.environ) -> float:
    """How long a rank waits for a peer or a collective before it reports and ends."""
    value = environ.get(COLLECTIVE_TIMEOUT, str(COLLECTIVE_TIMEOUT_S))
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"{COLLECTIVE_TIMEOUT} is {value!r}; set it to a number of seconds")
    return seconds


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
