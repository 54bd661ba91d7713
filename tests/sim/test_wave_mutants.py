"""Each wrong coordinator is found by the simulation that the right one passes."""

import pytest

from tests.sim.wave.draw import draw
from tests.sim.wave.mutants import MUTANTS
from tests.sim.wave.runner import broken_by, first_failure

SEEDS_MAX = 10_000


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_breaks_at_its_recorded_seed_what_is_recorded(name: str) -> None:
    mutant = MUTANTS[name]

    broken = broken_by(draw(mutant.seed), mutant.make)

    assert mutant.seed < SEEDS_MAX
    if not broken.startswith(f"{mutant.breaks}:"):
        failure = first_failure(mutant.make, range(SEEDS_MAX))
        pytest.fail(f"seed {mutant.seed} breaks {broken or 'nothing'}; to record: {failure}")


@pytest.mark.parametrize("name", MUTANTS)
def test_what_catches_a_mutant_is_no_fault_of_the_schedule(name: str) -> None:
    assert broken_by(draw(MUTANTS[name].seed)) == ""
