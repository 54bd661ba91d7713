"""What a router counts of its decode sessions together: sessions come and go, counts must not."""

from dataclasses import dataclass, field

from splitwave.runtime.metrics import SHORT_S, Histogram


@dataclass(slots=True)
class Tally:
    """Counts over all sessions that a router ever had."""

    gaps_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    """Between two arrivals of tokens of one stream (ITL)."""
    opened: int = 0
    reattached: int = 0
    """Times that a session went on over a new connection."""
    lost: int = 0
    """Sessions that ended while attempts ran in them."""
