"""How fast something is at its end, compared with its beginning, and how sure that is.

Figures are ratios within one run, so that a slow machine is no slow engine. Intervals come from
bootstrap by blocks: steps beside each other are alike (a neighbour on the machine slows many in a
row), and drawing them one by one would claim a certainty that is not there.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000
"""Bootstrap resamples; the interval's ends are good to a few per mille of its width."""
BLOCK_STEPS = 16
"""Steps that are drawn together. As many as vLLM's ranks run between two votes."""
SAMPLES_MIN = 8
"""Steps of one size that either end must have, for the size to be compared."""
_CONFIDENCE = (2.5, 97.5)

Floats = NDArray[np.float64]


class TooFewSamples(ValueError):
    """There is too little to compare; the message says of what."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and its bootstrap 95% interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Rounded, for evidence."""
        return {name: round(number, 4) for name, number in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of one rank: tokens that it computed for requests, and CPU seconds."""

    tokens: int
    cpu_s: float


def drift(steps: Sequence[StepSample], *, share: float = 0.1, seed: int = 0) -> Interval:
    """CPU seconds a step at equal batch, last `share` of the steps to the first, over all sizes.

    Raises TooFewSamples if no size can be compared.
    """
    part = int(len(steps) * share)
    return at_equal_size(steps[:part], steps[len(steps) - part :], seed=seed)


def at_equal_size(
    early: Sequence[StepSample],
    late: Sequence[StepSample],
    *,
    samples_min: int = SAMPLES_MIN,
    seed: int = 0,
) -> Interval:
    """Cost of late steps over that of early ones, each size for itself.

    A size's ratio is that of its medians; sizes are joined by their geometric mean, each weighted
    by the fewer of its steps in the two. Raises TooFewSamples if no size has `samples_min` steps
    in both.
    """
    before, after = by_size(early), by_size(late)
    strata = {
        size: (before[size], after[size])
        for size in before.keys() & after.keys()
        if min(len(before[size]), len(after[size])) >= samples_min
    }
    if not strata:
        raise TooFewSamples(
            f"no batch size has {samples_min} steps both among {len(early)} early and among"
            f" {len(late)} late ones"
        )
    return _interval(strata, block=BLOCK_STEPS, seed=seed)


def by_size(steps: Sequence[StepSample]) -> dict[int, Floats]:
    """CPU seconds of the steps of each batch size, in order; dummy steps (0 tokens) left out."""
    found: dict[int, list[float]] = {}
    for step in steps:
        if step.tokens:
            found.setdefault(step.tokens, []).append(step.cpu_s)
    return {size: np.asarray(seconds, np.float64) for size, seconds in found.items()}


def median_by_size(steps: Sequence[StepSample]) -> dict[int, float]:
    """Median CPU seconds a step, by batch size in ascending order."""
    return {size: float(np.median(seconds)) for size, seconds in sorted(by_size(steps).items())}


def medians_in_parts(steps: Sequence[StepSample], parts: int) -> list[float | None]:
    """Median CPU seconds a step of the commonest batch size, in equal parts of the run.

    None for a part without a step of that size.
    """
    sizes = by_size(steps)
    if not sizes:
        return [None] * parts
    commonest = max(sizes, key=lambda size: len(sizes[size]))
    edges = [len(steps) * part // parts for part in range(parts + 1)]
    found: list[float | None] = []
    for start, end in itertools.pairwise(edges):
        seconds = by_size(steps[start:end]).get(commonest)
        found.append(None if seconds is None else float(np.median(seconds)))
    return found


def growth(samples: Sequence[float]) -> float:
    """Median of the last tenth over that of the second tenth, less 1: 0.05 is 5% more.

    The first tenth is left out: allocators still reserve what they then keep.
    """
    tenth = len(samples) // 10
    if tenth < 1:
        raise TooFewSamples(f"{len(samples)} samples; 10 at least")
    early, late = samples[tenth : 2 * tenth], samples[len(samples) - tenth :]
    return float(np.median(late) / np.median(early)) - 1.0


def _interval(strata: Mapping[int, tuple[Floats, Floats]], *, block: int, seed: int) -> Interval:
    """Ratio over all strata with its interval; each stratum is resampled for itself."""
    source = np.random.default_rng(seed)
    drawn = [_ratio(strata, lambda x: _resampled(x, block, source)) for _ in range(DRAWS)]
    low, high = (float(edge) for edge in np.percentile(drawn, _CONFIDENCE))
    return Interval(_ratio(strata, lambda x: x), low, high)


def _ratio(strata: Mapping[int, tuple[Floats, Floats]], draw: Callable[[Floats], Floats]) -> float:
    logs, weights = [], []
    for early, late in strata.values():
        logs.append(np.log(np.median(draw(late)) / np.median(draw(early))))
        weights.append(min(len(early), len(late)))
    return float(np.exp(np.average(logs, weights=weights)))


def _resampled(values: Floats, block: int, source: np.random.Generator) -> Floats:
    """As many values, drawn in blocks of neighbours that may wrap around the end."""
    length = min(block, max(1, len(values) // 4))
    starts = source.integers(0, len(values), size=-(-len(values) // length))
    places = (starts[:, None] + np.arange(length)).ravel()[: len(values)] % len(values)
    drawn: Floats = values[places]
    return drawn
