"""The fingerprint of a running group: what its engines say of themselves, and its weights."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from splitwave.certify.weights import WeightsCache, weights_manifest
from splitwave.core.envelope import GroupShape
from splitwave.core.fingerprint import Difference, Fingerprint, ranks_differ, without_neutral
from splitwave.core.strict_json import Scalar
from splitwave.engine.port import Engine, GroupDescription


class RanksDiffer(Exception):
    """Two ranks of one group do not run the same. The message names the first difference."""

    def __init__(self, rank: int, difference: Difference) -> None:
        super().__init__(
            f"rank {rank} does not run as rank 0 does: {difference.name} is "
            f"{difference.found!r} there and {difference.certified!r} on rank 0"
        )
        self.rank = rank
        self.difference = difference


async def read_fingerprint(
    engine: Engine, model_path: Path | None, cache: WeightsCache
) -> Fingerprint:
    """Recompute the fingerprint of a group from its running engines and its weight files.

    `model_path`: the directory that its weights were loaded from; None for a simulated group.
    Files that `cache` does not know are hashed in a thread: minutes for large weights.
    Raises RanksDiffer, EngineDied, and OSError for files that cannot be read.
    """
    facts = await engine.fingerprint_facts()
    weights: Mapping[str, str] = {}
    if model_path is not None:
        weights = await asyncio.to_thread(weights_manifest, model_path, cache)
    return assemble(facts, weights)


def assemble(ranks: Sequence[Mapping[str, Scalar]], weights: Mapping[str, str]) -> Fingerprint:
    """Make the fingerprint of what each rank says and of the weights' digests by file."""
    counted = [without_neutral(values) for values in ranks]
    if (differ := ranks_differ(counted)) is not None:
        raise RanksDiffer(*differ)
    return Fingerprint(
        {**counted[0], **{f"weights.{name}": digest for name, digest in weights.items()}}
    )


def shape_of(description: GroupDescription) -> GroupShape:
    """The sizes that an envelope is asked about."""
    return GroupShape(
        ranks=description.ranks,
        tensor_parallel=description.tensor_parallel,
        seats_per_rank=description.seats_per_rank,
        sequence_max_tokens=description.model_len_max_tokens,
        step_max_tokens=description.batch_max_tokens,
        capture_grid=tuple(description.capture_grid),
    )
