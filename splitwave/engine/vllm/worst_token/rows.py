"""How many rows a worst-token dispatch takes room for. Pure."""

RECEIVE_STEP_TOKENS = 64
"""DeepEP V2 compiles its kernels for each bound, so bounds are few: powers of two up to this, and
multiples of it beyond."""


def receive_bound(padded_tokens: int) -> int:
    """Return the tokens a rank that a dispatch of V2 is compiled for, given the padded step's.

    It is at least `padded_tokens` and below 1.5 times of it from 64 on; never a function of the
    largest batch that the engine may schedule. ValueError for a step without a row.
    """
    if padded_tokens < 1:
        raise ValueError(f"padded_tokens: is {padded_tokens}; a captured step has at least one row")
    if padded_tokens <= RECEIVE_STEP_TOKENS:
        return 1 << (padded_tokens - 1).bit_length()
    return -(-padded_tokens // RECEIVE_STEP_TOKENS) * RECEIVE_STEP_TOKENS


def worst_rows(padded_tokens: int, ranks: int) -> int:
    """Return the rows that a rank may receive if every token of every rank comes to it."""
    return padded_tokens * ranks
