"""Each wrong coordinator is found by the simulation that the right one passes."""

import pytest

from tests.sim.wave.draw import draw
from tests.sim.wave.mutants import MUTANTS
from tests.sim.wave.runner import broken_by, first_failure

SEEDS_MAX = 10_000


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    if broken_by(draw(mutant.seed), mutant.make):
        return

    # The recorded seed shows it no more: any of the first 10,000 will do. Record the new one.
    failure = first_failure(mutant.make, range(SEEDS_MAX))

    assert failure is not None
    assert failure.seed < SEEDS_MAX


@pytest.mark.parametrize("name", MUTANTS)
def test_what_catches_a_mutant_is_no_fault_of_the_schedule(name: str) -> None:
    assert broken_by(draw(MUTANTS[name].seed)) == ""
