"""One rank of the hammer: sets up, walks, checks, and says where it is all the while."""

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from bench.hammer.beat import Beat, write_end
from bench.hammer.device import Cpu, Cuda, Device
from bench.hammer.graphs import FINISHED, LANE, Graphs, stage_name
from bench.hammer.rows import Rows
from bench.hammer.settings import Settings
from bench.hammer.transports import Transport, connect, own_kernel_cache
from splitwave.certify.hammer.verdict import EXIT_CODE, Phase, Verdict
from splitwave.certify.hammer.walk import Step, plan

CHECK_EVERY = 200
"""Replays between two looks at the tally, where the ranks also agree whether to go on."""


PR_SET_PDEATHSIG = 1
"""Linux: this process is killed with its parent, however that ends."""

BUSY_MS = 1.0
"""How long a GPU is kept busy before a replay that must still run when the host goes on."""


class WrongCount(Exception):
    """A host-synchronised dispatch returned another number of rows than were sent."""


class Walker:
    """Replays the walk."""

    def __init__(self, settings: Settings, rank: int, beat: Beat, device: Device) -> None:
        self._settings, self._rank, self._beat, self._device = settings, rank, beat, device
        self._steps = plan(settings.walk())
        self._rows, self._graphs, self._transport = stacked(settings, rank, beat, device)
        self._outstanding: deque[Callable[[], None]] = deque()
        self.replays = 0
        self.wrong = ""

    def prepare(self) -> None:
        """Warm and capture each size, the largest first, all ranks at the same size."""
        sizes = sorted(self._settings.sizes, reverse=True)
        for phase, act in ((Phase.WARM, self._graphs.warm), (Phase.CAPTURE, self._graphs.capture)):
            for size in sizes:
                self._beat.enter(phase, size)
                self._rows.stage(Step(size, (size,) * self._settings.ranks,
                                      (0,) * self._settings.ranks, 1.0))  # fmt: skip
                dist.barrier()
                act(size)
        self._device.drain()
        dist.barrier()

    def look(self) -> tuple[int, tuple[str, ...]] | None:
        """Return finished replays and where the device is in its graph."""
        try:
            marks = self._device.peek(self._graphs.marks)
        except RuntimeError:
            return None  # After a fault the device answers nothing; the last answer stands.
        if marks is None:
            return None
        return marks[FINISHED], tuple(stage_name(mark) for mark in marks[LANE:])

    def walk(self) -> Verdict:
        """Replay until the end, a wrong row, or the time is over."""
        end_s = time.monotonic() + self._settings.seconds
        for replay, step in enumerate(self._steps):
            self._sabotage(replay)
            self._be_late(step)
            self._replay(replay, step)
            if step.eager:
                self._eager(replay, step)
            self._hold_back()
            self.replays = replay + 1
            if self.replays % CHECK_EVERY == 0 or self.replays == len(self._steps):
                over = self._agree(late=time.monotonic() > end_s)
                if over is not None:
                    return over
        return Verdict.PASSED

    def _be_late(self, step: Step) -> None:
        skew = step.skew
        if skew is None or skew.rank != self._rank:
            return
        if skew.late != "gpu":
            time.sleep(skew.ms / 1000)
        if skew.late != "host":
            self._device.spin(skew.ms)

    def _replay(self, replay: int, step: Step) -> None:
        self._beat.issue(step.size_of(self._rank))
        if step.eager:
            self._device.spin(BUSY_MS)
        self._rows.stage(step)
        if self._settings.poison_buffer and self._transport is not None:
            self._transport.poison()
        self._graphs.replay(step.size_of(self._rank), replay)
        self._spoil(replay)
        self._rows.check(step, replay)
        self._graphs.mark(FINISHED, replay + 1)

    def _eager(self, replay: int, step: Step) -> None:
        """Send some of the inputs with a host that waits for their number, behind a replay."""
        tokens = step.eager_tokens
        n, entry = tokens[self._rank], step.entries[self._rank]
        if self._settings.drain != "none":
            self._device.drain()
        pool = self._rows.pool
        x = pool.x[entry, :n] * step.factor
        ids, weights = pool.ids[self._rank, entry, 0, :n], pool.weights[entry, 0, :n]
        assert self._transport is not None, "whole layers have no host-synchronised dispatches"
        received = self._transport.eager(x, ids, weights)
        count, expected = received.x.shape[0], self._rows.received_rows(step, tokens)
        if count != expected:
            raise WrongCount(f"replay {replay}: {count} rows received, {expected} were sent")
        y, _ = self._rows.expert(received.x, received.ids, received.weights, None)
        self._rows.check_eager(step, self._transport.combine(y, received, 0), replay)

    def _hold_back(self) -> None:
        """Wait as the settings say, and never run further ahead of the device than allowed."""
        self._outstanding.append(self._device.ticket())
        if self._settings.drain != "none":
            self._device.drain()
        if self._settings.drain == "barrier":
            dist.barrier()
        while len(self._outstanding) > self._settings.run_ahead:
            self._outstanding.popleft()()

    def _agree(self, *, late: bool) -> Verdict | None:
        """Read the tally; all ranks go on or stop together."""
        found = self._rows.tally.read()
        wrong = found["wrong_rows"] > 0 or found["wrong_loads"] > 0
        if wrong:
            self.wrong = self._describe(found)
        flags = torch.tensor([int(wrong), int(late)])
        dist.all_reduce(flags)
        if flags[0] > 0:
            return Verdict.WRONG_ROWS
        if flags[1] > 0 and self.replays < len(self._steps):
            return Verdict.SHORT
        return None

    def _describe(self, found: dict[str, int]) -> str:
        first = min(r for r in (found["replay"], found["load_replay"]) if r >= 0)
        before = self._steps[first - 1] if first else None
        return (
            f"{found['wrong_rows']} wrong rows in {found['wrong_replays']} replays, wrong loads in "
            f"{found['wrong_loads']}; first in replay {first}, row {found['row']}: "
            f"{self._steps[first]} after {before}"
        )

    def _sabotage(self, replay: int) -> None:
        """Do what a planted fault says, to this rank's own program."""
        plant = self._settings.plant
        if plant is None or (plant.replay, plant.rank) != (replay, self._rank):
            return
        if plant.kind == "hang":
            time.sleep(3600)
        elif plant.kind == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif plant.kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif plant.kind == "error":
            raise RuntimeError("a planted error")

    def _spoil(self, replay: int) -> None:
        """Do what a planted fault says, to a replay's rows."""
        plant = self._settings.plant
        if plant is None or (plant.replay, plant.rank) != (replay, self._rank):
            return
        if plant.kind == "wrong_row":
            self._rows.out[:1].mul_(2)
        elif plant.kind == "lost_row":
            self._rows.load[0, :1].sub_(1)

    def figures(self) -> dict[str, object]:
        """Return what the rank found."""
        return {
            "replays": self.replays,
            "wrong": self.wrong,
            "tally": self._rows.tally.read(),
        }


def stacked(
    settings: Settings, rank: int, beat: Beat, device: Device
) -> tuple[Rows, Graphs, Transport | None]:
    """Build the rows and the graphs of the level under test. Collective."""
    if settings.level == "layer":
        from bench.hammer.layers import LayerGraphs, LayerRows, build_layer

        layered = LayerRows(settings, rank, device.place)
        beat.enter(Phase.BUFFERS)
        graphs = LayerGraphs(settings, device, None, layered)
        graphs.layer = build_layer(settings, layered, rank)
        return layered, graphs, None
    rows = Rows(settings, rank, device.place)
    beat.enter(Phase.BUFFERS)
    transport = connect(settings, dist.group.WORLD)
    return rows, Graphs(settings, device, transport, rows), transport


def join(settings: Settings, rank: int, folder: Path) -> None:
    """Make the group of all ranks, over files and the loopback interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.setup_s),
    )


def versions(device: Device) -> dict[str, str]:
    """Return versions of what the figures depend on."""
    found = {"python": sys.version.split()[0], **device.versions()}
    for package in ("sgl-deep-ep", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run(settings: Settings, rank: int, folder: Path, beat: Beat) -> tuple[int, dict[str, object]]:
    """Return the exit code and what is worth reporting."""
    if settings.plant is not None and (settings.plant.kind, settings.plant.rank) == ("setup", rank):
        raise RuntimeError("a planted error")
    dry = settings.transport == "dry"
    if not dry:
        own_kernel_cache(rank)
    one_channel = settings.tbo and settings.microbatch_buffers == 1
    device: Device = Cpu() if dry else Cuda(rank, settings.pool, one_channel=one_channel)
    write_end(folder, rank, {"device": device.name, "versions": versions(device)})
    join(settings, rank, folder)
    walker = Walker(settings, rank, beat, device)
    walker.prepare()
    beat.look = walker.look
    beat.enter(Phase.REPLAY)
    began_s = time.monotonic()
    try:
        verdict = walker.walk()
    except WrongCount as error:
        # The peers are in the middle of a dispatch that can no longer end well: nothing is read.
        return EXIT_CODE[Verdict.WRONG_ROWS], {"replays": walker.replays, "wrong": str(error)}
    seconds = round(time.monotonic() - began_s, 2)
    return EXIT_CODE[verdict], walker.figures() | {"seconds": seconds}


def main(folder: Path, rank: int) -> int:
    """Run one rank; every way out leaves a result, and no exit waits for a stuck GPU."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    beat = Beat(folder, rank)
    beat.start()
    try:
        code, found = run(Settings.load(folder / "settings.json"), rank, folder, beat)
        beat.enter(Phase.DONE)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent must hear of it
        traceback.print_exc()
        code, found = EXIT_CODE[Verdict.FAULT], {"error": f"{type(error).__name__}: {error}"}
    write_end(folder, rank, found)
    beat.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1]), int(sys.argv[2])))
