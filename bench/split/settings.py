"""What a file of bench/workloads says of a comparison, checked when it is read."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitwave.core.mode import MODES

FOLDER = Path(__file__).parents[1] / "workloads"
ENGINES = ("vllm", "sim")
ROLES = {"split": ("prefill", "decode"), "aggregated": ("both",)}
"""Of a system's groups, by its kind."""


class SettingsError(ValueError):
    """The file asks for what cannot be run; the message names the field and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests arrive."""

    kind: str
    """`poisson`: at random, `value` a second; `closed`: `value` streams, each with one request."""
    value: float

    @property
    def name(self) -> str:
        """As cells are called."""
        return f"{self.kind}-{self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Requests of one size, and the loads at which they are sent."""

    prompt_tokens: int
    completion_tokens: int
    rates: tuple[float, ...] = ()
    """Requests a second, ascending."""
    streams: tuple[int, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)
    """In place of the comparison's, by name: short requests need less time to be steady."""

    @property
    def name(self) -> str:
        """As cells are called."""
        return f"{self.prompt_tokens}x{self.completion_tokens}"

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every load, rates first."""
        rates = [Load(kind="poisson", value=rate) for rate in self.rates]
        return (*rates, *(Load(kind="closed", value=streams) for streams in self.streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Good service: a request keeps all three limits."""

    ttft_ms: float
    itl_p99_ms: float
    """Of one request's gaps."""
    tpot_ms: float
    attained_share: float
    """A load is carried if so many of its requests are good."""
    give_up_share: float
    """Higher rates are not run once fewer are good than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one cell: it warms up, is measured, and goes on while the measured requests end."""

    warm_s: float
    measure_s: float
    cool_s: float
    drain_s: float
    """What has not ended so long after the last arrival is dropped."""
    system_s: float
    """A system's processes are ended after this, cells or none."""
    ready_s: float
    """And earlier, if they do not answer by then."""
    boot_s: float
    """What a start is expected to take."""

    @property
    def cell_s(self) -> float:
        """What a cell is expected to take."""
        return self.warm_s + self.measure_s + self.cool_s + 3.0

    @property
    def cell_max_s(self) -> float:
        """What it may take."""
        return self.cell_s + self.drain_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that step together, one a GPU."""

    role: str
    devices: tuple[int, ...]
    seats: int
    """Requests that one rank runs at once."""
    batch_tokens: int
    """Tokens of one step of one rank."""
    mode: str = ""
    """Splitwave's execution mode, of prefill and decode groups."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More settings of a worker's engines, by name."""
    arguments: tuple[str, ...] = ()
    """More arguments of its program."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSettings:
    """One system."""

    name: str
    kind: str
    words: str
    groups: tuple[Group, ...]
    front_ends: int = 1
    """Routers, or API servers of each aggregated group."""
    router_arguments: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Every GPU of the system."""
        return tuple(device for group in self.groups for device in group.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The timing model of simulated engines; every rank of every system has the same."""

    step_fixed_s: float = 0.001
    step_per_token_s: float = 0.0
    step_per_prefill_token_s: float = 0.0
    pull_fixed_s: float = 0.001
    pull_bytes_per_s: float = 1e10
    block_bytes: int = 65_536
    blocks_per_rank: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole file."""

    name: str
    words: str
    seed: int
    clients: int
    """Processes that ask."""
    token_ids: tuple[int, int]
    """Lowest and highest of prompts."""
    length_max_tokens: int
    times: Times
    slo: Slo
    shapes: tuple[Shape, ...]
    systems: tuple[SystemSettings, ...]
    pace: Pace
    device: str = "gpu"
    """What real engines compute on; `cpu` tries the commands out where there is no GPU."""

    @classmethod
    def read(cls, name: str, folder: Path = FOLDER) -> "Comparison":
        """Read `NAME.toml`. Raises SettingsError."""
        told = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        try:
            made = cls(
                name=name,
                words=told["words"],
                seed=told["seed"],
                clients=told["clients"],
                token_ids=tuple(told["token_ids"]),
                length_max_tokens=told["length_max_tokens"],
                times=Times(**told["times"]),
                slo=Slo(**told["slo"]),
                shapes=tuple(_shape(shape) for shape in told["shapes"]),
                systems=tuple(_system(key, each) for key, each in told["systems"].items()),
                pace=Pace(**told.get("sim", {})),
                device=told.get("device", "gpu"),
            )
        except (KeyError, TypeError) as error:
            raise SettingsError(f"{name}.toml: {error}") from error
        _check(made)
        return made

    def system(self, name: str) -> SystemSettings:
        """The system of that name."""
        return next(system for system in self.systems if system.name == name)

    def shape(self, name: str) -> Shape:
        """The shape of that name."""
        return next(shape for shape in self.shapes if shape.name == name)

    def times_of(self, shape: Shape) -> Times:
        """The times of a shape's cells."""
        return dataclasses.replace(self.times, **shape.times)

    def digest(self, system: str, shape: str, engine: str) -> str:
        """Of all that a cell's figures depend on, its load and the code left out."""
        sizes = self.shape(shape)
        parts = dataclasses.asdict(self.system(system))
        parts |= {"seed": self.seed, "token_ids": self.token_ids, "clients": self.clients}
        parts |= {"length_max_tokens": self.length_max_tokens, "engine": engine}
        parts |= {"tokens": (sizes.prompt_tokens, sizes.completion_tokens)}
        parts |= {
            "times": dataclasses.asdict(self.times_of(sizes)),
            "slo": dataclasses.asdict(self.slo),
        }
        if engine == "sim":
            parts |= {"pace": dataclasses.asdict(self.pace)}
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shape(told: Mapping[str, object]) -> Shape:
    lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return Shape(**{**told, **lists})  # type: ignore[arg-type]  # TypeError becomes SettingsError


def _system(name: str, told: Mapping[str, object]) -> SystemSettings:
    given = dict(told)
    groups = given.pop("groups")
    assert isinstance(groups, list)
    arguments = given.pop("router_arguments", [])
    return SystemSettings(
        name=name,
        groups=tuple(_group(group) for group in groups),
        router_arguments=tuple(arguments),  # type: ignore[arg-type]  # lists, in files
        **given,  # type: ignore[arg-type]  # TypeError becomes SettingsError
    )


def _group(told: Mapping[str, object]) -> Group:
    lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return Group(**{**told, **lists})  # type: ignore[arg-type]  # TypeError becomes SettingsError


def _require(holds: bool, field_name: str, problem: str) -> None:
    if not holds:
        raise SettingsError(f"{field_name}: {problem}")


def _check(made: Comparison) -> None:
    _require(made.device in ("gpu", "cpu"), "device", "is gpu or cpu")
    _require(made.clients >= 1, "clients", "set it to at least 1")
    _require(0 <= made.token_ids[0] < made.token_ids[1], "token_ids", "give the lowest and highest")
    for shape in made.shapes:
        known = shape.times.keys() <= Times.__dataclass_fields__.keys()
        _require(known, f"shapes.{shape.name}.times", "names what [times] does not have")
        longest = shape.prompt_tokens + shape.completion_tokens
        fits = longest <= made.length_max_tokens
        _require(fits, f"shapes.{shape.name}", f"takes {longest} tokens: raise length_max_tokens")
        ascending = list(shape.rates) == sorted(set(shape.rates))
        _require(ascending, f"shapes.{shape.name}.rates", "write them in ascending order")
        _require(bool(shape.loads), f"shapes.{shape.name}", "give rates, streams or both")
    for share in ("attained_share", "give_up_share"):
        _require(0.0 < getattr(made.slo, share) <= 1.0, f"slo.{share}", "set it above 0, to 1")
    for system in made.systems:
        _check_system(system)


def _check_system(system: SystemSettings) -> None:
    where = f"systems.{system.name}"
    _require(system.kind in ROLES, f"{where}.kind", f"is one of {', '.join(ROLES)}")
    roles = tuple(group.role for group in system.groups)
    if system.kind == "split":
        _require(roles == ROLES["split"], f"{where}.groups", "one prefill and one decode, in turn")
    else:
        _require(set(roles) == {"both"}, f"{where}.groups", "each has the role `both`")
    shared = len(set(system.devices)) < len(system.devices)
    _require(not shared, f"{where}.groups", "a GPU is in two groups; they would take turns")
    for group in system.groups:
        _require(bool(group.devices), f"{where}.{group.role}.devices", "name one GPU a rank")
        known = not group.mode or (group.mode in MODES and MODES[group.mode].role == group.role)
        _require(known, f"{where}.{group.role}.mode", f"{group.mode!r} is no mode of that role")
