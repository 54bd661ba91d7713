"""A client of the front door, without an API between: orders, and keeps what it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.order import Ending, Order
from services.router.sink import Part
from splitwave.core.generation import Sampling, TokenLogprob
from splitwave.text import TextOptions


@dataclass(slots=True)
class Got:
    """What one order of one choice has come to."""

    token_ids: list[int] = field(default_factory=list)
    ending: Ending | None = None

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Nobody asks for them."""

    def part(self, choice: int, part: Part) -> None:
        """New tokens."""
        self.token_ids += part.token_ids

    def end(self, choice: int, ending: Ending) -> None:
        """It has ended well."""
        self.ending = ending


def order_of(request_id: str, token_ids: list[int], sampling: Sampling) -> Order:
    """One completion."""
    return Order(request_id=request_id, token_ids=token_ids, sampling=sampling, text=TextOptions())
