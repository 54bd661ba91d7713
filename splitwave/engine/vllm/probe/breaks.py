"""Names of what can be broken in a running engine. Imports no vLLM."""

import enum


class Break(enum.StrEnum):
    """One thing that a positive control breaks, and takes back afterwards."""

    WEIGHTS = "weights"
    """The final norm's weights are 2% too large: tokens stay, log probabilities move."""
    WEIGHTS_AT_SIZE = "weights_at_size"
    """The same, in steps of exactly so many tokens: one captured size that replays wrongly."""
    POISON = "poison"
    """No break yet: padding rows hold other token ids and positions in each step."""
    POISON_REACHES = "poison_reaches"
    """The last row that counts is poisoned too, in steps that are padded."""
    SLOW = "slow"
    """Each step burns the time that it took once more; on a GPU, that since the step before."""
    LEAK_MEMORY = "leak_memory"
    """Each step keeps so many bytes for ever."""
    ODD_STEP = "odd_step"
    """One step is executed, by the engine's own record, as a kind that no mode has."""
    LEAK_BLOCKS = "leak_blocks"
    """The KV blocks of the next request that ends are not freed."""
    LATE_WAKE = "late_wake"
    """For so many seconds this rank does not hear that a wave starts."""

    LOSE_REQUEST = "lose_request"
    """The next request that comes is dropped, and nobody hears of it."""
    NARROW = "narrow"
    """No break yet: the scheduler's own limits of a step are so many tokens, a seat each."""


OF_THE_SCHEDULER = frozenset({Break.LEAK_BLOCKS, Break.LATE_WAKE, Break.LOSE_REQUEST, Break.NARROW})
"""Those that are made in the engine core; the others are made in its workers."""
