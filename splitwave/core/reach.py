"""How far numbers reach that come from outside, whoever reads them."""

SECONDS_MAX = 1e6
"""More than anybody waits, and what clocks and deadlines take."""
COUNT_MAX = 2**31 - 1
"""Of what is counted: the wire, and vLLM, have 32 bits for most of it."""
WIDE_MAX = 2**63 - 1
"""Of what needs 64 bits: bytes, epochs, seeds, rates."""
