"""How many rows a worst-token dispatch takes room for. Pure."""

RECEIVE_STEP_TOKENS = 64
"""DeepEP V2 compiles its kernels for each bound, so bounds are few: powers of two up to this, and
multiples of it beyond."""


def receive_bound(padded_tokens: int, buffer_tokens_max: int) -> int:
    """Return the tokens a rank that a dispatch of V2 is compiled for, given the padded step's.

    It is at least `padded_tokens` and below twice as many; never beyond what the buffer was made
    for, `buffer_tokens_max`. ValueError for a step without a row, or with more than fit.
    """
    if not 1 <= padded_tokens <= buffer_tokens_max:
        raise ValueError(
            f"padded_tokens: is {padded_tokens}; a captured step has 1 to {buffer_tokens_max} "
            "rows, which is what its buffer is made for (max_num_batched_tokens)"
        )
    if padded_tokens <= RECEIVE_STEP_TOKENS:
        bound = 1 << (padded_tokens - 1).bit_length()
    else:
        bound = -(-padded_tokens // RECEIVE_STEP_TOKENS) * RECEIVE_STEP_TOKENS
    return min(bound, buffer_tokens_max)


def worst_rows(padded_tokens: int, ranks: int) -> int:
    """Return the rows that a rank may receive if every token of every rank comes to it."""
    return padded_tokens * ranks
