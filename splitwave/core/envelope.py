"""What a mode is certified for: shapes and loads within which it was proved, and no others.

Asked in two places: of a group at start (`refuse_group`) and of a request before it is placed
(`refuse_request`). What a rank is given at once is within by the first: a group grants no more
seats than it has. Every refusal names the limit that would be left.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from splitwave.core.strict_json import Fields, JsonError


class Limit(enum.StrEnum):
    """A side of the envelope, as refusals, metrics and logs name it."""

    RANKS = "ranks"
    TENSOR_PARALLEL = "tensor_parallel"
    CAPTURE_GRID = "capture_grid"
    TOKENS_CAP = "tokens_cap"
    SEATS = "seats"
    SEQUENCE_LENGTH = "sequence_length"
    PROMPT_LENGTH = "prompt_length"
    OUTPUT_LENGTH = "output_length"
    SAMPLING = "sampling"


@dataclass(frozen=True, slots=True)
class OutsideEnvelope:
    """A refusal: which limit, what was asked for, and what is certified."""

    limit: Limit
    asked: int | str
    certified: int | str
    message: str

    def __str__(self) -> str:
        return f"outside the certified envelope ({self.limit}): {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The mix of requests that the mode was proved under."""

    output_max_tokens: int
    """Longest output of one request."""
    sampling: tuple[str, ...] = ()
    """Sampling features that ran (`splitwave.core.generation.Sampling`'s field names), sorted."""

    def __post_init__(self) -> None:
        _at_least("traffic.output_max_tokens", self.output_max_tokens, 1)
        _sorted_once("traffic.sampling", self.sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The sizes of a group as its engines run with them."""

    ranks: int
    tensor_parallel: int
    seats_per_rank: int
    sequence_max_tokens: int
    """Longest prompt and output together that its engines take."""
    step_max_tokens: int
    """Tokens of one step of one rank."""
    capture_grid: tuple[int, ...] = ()
    """Batch sizes that are captured or warmed up, ascending; empty in an eager mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One certified envelope. Sizes are of one rank unless they say otherwise."""

    ranks: int
    """Data-parallel ranks of a group: exactly so many."""
    tensor_parallel: int = 1
    capture_grid: tuple[int, ...] = ()
    """Batch sizes (rows of a step) that were captured or warmed up, ascending; empty: any batch up
    to `seats_max`, in an eager mode."""
    step_min_tokens: int = 0
    """Floor of a step's tokens below which the mode is not at its best; for placement."""
    step_max_tokens: int
    """Cap of a step's tokens."""
    seats_max: int
    """Requests that one rank steps at once."""
    prompt_max_tokens: int
    sequence_max_tokens: int
    """Prompt and output together."""
    traffic: Traffic

    def __post_init__(self) -> None:
        for name in ("ranks", "tensor_parallel", "step_max_tokens", "seats_max",
                     "prompt_max_tokens", "sequence_max_tokens"):  # fmt: skip
            _at_least(name, getattr(self, name), 1)
        _at_least("step_min_tokens", self.step_min_tokens, 0)
        _sorted_once("capture_grid", self.capture_grid)
        _at_least("capture_grid", min(self.capture_grid, default=1), 1)
        _at_most("step_min_tokens", self.step_min_tokens, "step_max_tokens", self.step_max_tokens)
        _at_most(
            "prompt_max_tokens", self.prompt_max_tokens,
            "sequence_max_tokens", self.sequence_max_tokens,
        )  # fmt: skip
        if self.capture_grid:
            _at_most("seats_max", self.seats_max, "the largest capture size", self.capture_grid[-1])

    def refuse_group(self, group: GroupShape) -> OutsideEnvelope | None:
        """Say why a group of this shape is not certified, or None."""
        missing = sorted(set(group.capture_grid) ^ set(self.capture_grid))
        return _first(
            _differs(Limit.RANKS, "ranks", group.ranks, self.ranks),
            _differs(
                Limit.TENSOR_PARALLEL, "ranks of tensor parallelism",
                group.tensor_parallel, self.tensor_parallel,
            ),
            None
            if not missing
            else OutsideEnvelope(
                Limit.CAPTURE_GRID, _words(group.capture_grid), _words(self.capture_grid),
                f"the grid is {_words(group.capture_grid)}, certified {_words(self.capture_grid)}; "
                f"first difference: {missing[0]}",
            ),
            _exceeds(Limit.SEATS, "seats a rank", group.seats_per_rank, self.seats_max),
            _exceeds(
                Limit.SEQUENCE_LENGTH, "tokens of a sequence",
                group.sequence_max_tokens, self.sequence_max_tokens,
            ),
            _exceeds(
                Limit.TOKENS_CAP, "tokens of a step", group.step_max_tokens, self.step_max_tokens
            ),
        )  # fmt: skip

    def refuse_request(
        self, *, prompt_tokens: int, output_max_tokens: int, sampling: Iterable[str] = ()
    ) -> OutsideEnvelope | None:
        """Say why no group with this certificate may serve a request, however idle, or None.

        `sampling`: names of the features that the request asks for.
        """
        unproved = sorted(set(sampling) - set(self.traffic.sampling))
        return _first(
            _exceeds(
                Limit.PROMPT_LENGTH, "tokens of the prompt", prompt_tokens, self.prompt_max_tokens
            ),
            _exceeds(
                Limit.OUTPUT_LENGTH, "tokens of the output",
                output_max_tokens, self.traffic.output_max_tokens,
            ),
            _exceeds(
                Limit.SEQUENCE_LENGTH, "tokens of prompt and output",
                prompt_tokens + output_max_tokens, self.sequence_max_tokens,
            ),
            None
            if not unproved
            else OutsideEnvelope(
                Limit.SAMPLING, unproved[0], _words(self.traffic.sampling),
                f"{unproved[0]} was not certified; certified: {_words(self.traffic.sampling)}",
            ),
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """The envelope as plain values."""
        own: dict[str, object] = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "traffic"
        }
        return own | {
            "capture_grid": list(self.capture_grid),
            "traffic": {
                "output_max_tokens": self.traffic.output_max_tokens,
                "sampling": list(self.traffic.sampling),
            },
        }


def read_envelope(value: object, where: str = "envelope") -> Envelope:
    """The inverse of `to_json`; JsonError names the field that is wrong, missing or unknown."""
    found = Fields(value, where)
    traffic = found.fields("traffic")
    try:
        envelope = Envelope(
            ranks=found.whole("ranks"),
            tensor_parallel=found.whole("tensor_parallel"),
            capture_grid=found.whole_numbers("capture_grid"),
            step_min_tokens=found.whole("step_min_tokens"),
            step_max_tokens=found.whole("step_max_tokens"),
            seats_max=found.whole("seats_max"),
            prompt_max_tokens=found.whole("prompt_max_tokens"),
            sequence_max_tokens=found.whole("sequence_max_tokens"),
            traffic=Traffic(
                output_max_tokens=traffic.whole("output_max_tokens"),
                sampling=traffic.texts("sampling"),
            ),
        )
    except EnvelopeError as error:
        raise JsonError(f"{where}.{error}") from None
    traffic.end()
    found.end()
    return envelope


class EnvelopeError(ValueError):
    """An envelope that contradicts itself. The message begins with the field."""


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise EnvelopeError(f"{name}: is {value}; must be at least {least}")


def _at_most(name: str, value: int, other: str, most: int) -> None:
    if value > most:
        raise EnvelopeError(f"{name}: is {value}, above {other}, {most}")


def _sorted_once(name: str, values: Sequence[int] | Sequence[str]) -> None:
    if list(values) != sorted(set(values)):  # type: ignore[type-var]  # all of one kind
        raise EnvelopeError(f"{name}: must ascend, each value once")


def _words(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _exceeds(limit: Limit, what: str, asked: int, certified: int) -> OutsideEnvelope | None:
    if asked <= certified:
        return None
    return OutsideEnvelope(limit, asked, certified, f"{asked} {what}; certified are {certified}")


def _differs(limit: Limit, what: str, asked: int, certified: int) -> OutsideEnvelope | None:
    if asked == certified:
        return None
    return OutsideEnvelope(limit, asked, certified, f"{asked} {what}; certified are {certified}")


def _first(*refusals: OutsideEnvelope | None) -> OutsideEnvelope | None:
    return next((refusal for refusal in refusals if refusal is not None), None)
