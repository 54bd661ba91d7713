"""What a hammer's run is told, and its words on the command line."""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from splitwave.certify.hammer.walk import WalkSettings

TRANSPORTS = ("v2", "legacy", "legacy_unfixed", "legacy_shared", "dry")
DRAINS = ("none", "stream", "barrier")
PLANTS = ("wrong_row", "lost_row", "hang", "freeze", "error", "crash", "setup")
EAGER_SHARE = 0.125
"""Of the replays, where host-synchronised dispatches come between: the legacy transport with the
race, and the one that engines are served with, which must drain the stream before each."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault on purpose: before this replay, on this rank."""

    kind: str
    replay: int
    rank: int

    @classmethod
    def parse(cls, text: str) -> "Plant":
        """Read `KIND@REPLAY:RANK`, such as `hang@40:1`."""
        kind, _, place = text.partition("@")
        replay, _, rank = place.partition(":")
        if kind not in PLANTS:
            raise argparse.ArgumentTypeError(f"no such fault: {kind} (there are {PLANTS})")
        return cls(kind, int(replay or 0), int(rank or 0))


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. Times are in seconds unless the name says otherwise."""

    transport: str
    replays: int
    sizes: tuple[int, ...]
    hidden: int
    experts: int
    topk: int
    layers: int
    skew_ms: float
    skew_budget_s: float
    seconds: float
    setup_s: float
    stall_s: float
    seed: int
    drain: str
    tbo: bool
    pool: str
    sanitise: bool
    poison_buffer: bool
    run_ahead: int
    astray: float
    product: bool
    level: str
    inner: int
    tbo_buffers: int
    buffer_mib: int
    ranks: int
    plant: Plant | None
    out: str

    @property
    def microbatch_buffers(self) -> int:
        """Buffers that the microbatches of a graph have between them."""
        return self.tbo_buffers if self.tbo and self.transport == "v2" else 1

    def eager_share(self) -> float:
        """Return the share of replays that a host-synchronised dispatch follows."""
        drained = self.product and self.transport == "legacy" and self.level == "kernel"
        return EAGER_SHARE if drained or self.transport == "legacy_unfixed" else 0.0

    def walk(self) -> WalkSettings:
        """Return what the walk is planned from."""
        return WalkSettings(
            sizes=self.sizes,
            replays=self.replays,
            seed=self.seed,
            ranks=self.ranks,
            entries=8 if self.transport == "dry" or self.level == "layer" else 32,
            skew_ms_max=self.skew_ms,
            skew_budget_s=self.skew_budget_s,
            astray_share=self.astray,
            eager_share=self.eager_share(),
        )

    def save(self, path: Path) -> None:
        """Write for a rank's process."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Settings":
        """Read what `save` wrote."""
        values = json.loads(path.read_text())
        values["sizes"] = tuple(values["sizes"])
        if values["plant"] is not None:
            values["plant"] = Plant(**values["plant"])
        return cls(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with the code of a setup that failed: argparse's own, 2, says hang here."""
        self.exit(4, f"{self.prog}: {message}\n")


def parse(arguments: list[str] | None = None) -> Settings:
    """Read the command line; ends the program with code 4 on settings that cannot work."""
    parser = _Parser(prog="python -m bench.hammer", description=__doc__)
    _add_traffic(parser)
    _add_limits(parser)
    found = vars(parser.parse_args(arguments))
    if found.pop("dry"):
        found["transport"] = "dry"
    if found["skew_budget_s"] is None:
        found["skew_budget_s"] = found["seconds"] / 5
    settings = Settings(**found)
    wrong = complaint(settings)
    if wrong:
        parser.error(wrong)
    return settings


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--transport", choices=TRANSPORTS, default="v2")
    add("--dry", action="store_true", help="a fake transport on the CPU")
    add("--replays", type=int, default=50_000)
    add("--sizes", type=_sizes, default=(64, 128, 192, 256))
    add("--hidden", type=int, default=2048)
    add("--experts", type=int, default=128)
    add("--topk", type=int, default=8)
    add("--layers", type=int, default=2)
    add("--seed", type=int, default=1)
    add("--drain", choices=DRAINS, default="none", help="between replays")
    add("--tbo", action="store_true", help="two microbatches on two streams in each graph")
    add("--tbo-buffers", type=int, choices=(1, 2), default=2, help="v2: of the two microbatches")
    add("--level", choices=("kernel", "layer"), default="kernel", help="what a graph is made of")
    add("--inner", type=int, default=256, help="layer: width of an expert")
    add("--product", action="store_true", help="through the transport that engines are served with")
    add("--pool", choices=("own", "shared"), default="own", help="memory of the graphs")
    add("--no-sanitise", dest="sanitise", action="store_false", help="v2: believe stale rows")
    add("--poison-buffer", action="store_true", help="legacy: also poison the receive buffer")
    add("--run-ahead", type=int, default=4, help="replays that a rank may issue ahead of its GPU")
    add("--astray", type=float, default=0.0, help="share of replays with ranks in unlike graphs")
    add("--buffer-mib", type=int, default=1024, help="of one legacy buffer")
    add("--ranks", type=int, default=2)
    add("--plant", type=Plant.parse, help="a fault on purpose: KIND@REPLAY:RANK")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--skew-ms", type=float, default=20.0, help="longest lateness of one rank")
    add("--skew-budget-s", type=float, help="of all lateness together; a fifth of --seconds")
    add("--seconds", type=float, default=360.0, help="for the replays")
    add("--setup-s", type=float, default=240.0, help="for buffers, warm-up and capture")
    add("--stall-s", type=float, default=15.0, help="a standstill this long is a hang")
    add("--out", default="hammer.json")


def complaint(settings: Settings) -> str:
    """Return why these settings cannot work, or an empty text."""
    if settings.experts % settings.ranks or settings.experts // settings.ranks < settings.topk:
        return "each rank needs the same number of experts, and at least top-k of them"
    if settings.tbo and any(size % 2 for size in settings.sizes):
        return "two microbatches need even sizes"
    if settings.tbo and settings.transport == "legacy_unfixed":
        return "the host-synchronised dispatches of legacy_unfixed have no microbatches"
    if settings.product and (settings.tbo or settings.transport not in ("v2", "legacy")):
        return "the served transports are v2 and legacy, and take microbatches only from vLLM"
    layered = settings.level == "layer"
    if layered and (settings.tbo or settings.transport not in ("v2", "legacy", "legacy_shared")):
        return "whole layers run over v2, legacy and legacy_shared, without microbatches"
    if settings.stall_s <= settings.skew_ms / 1000:
        return "a standstill must be longer than the skew"
    if settings.replays < 1 or settings.layers < 1 or settings.run_ahead < 1:
        return "replays, layers and run-ahead are at least 1"
    return ""
