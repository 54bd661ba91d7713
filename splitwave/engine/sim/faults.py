"""Seeded draws. Each depends on the seed and on what it strikes, never on what ran before."""

import hashlib

from splitwave.engine.sim.settings import SimFaults


def strikes(faults: SimFaults, rate: float, *what: object) -> bool:
    """True for a share `rate` of all `what`."""
    if rate <= 0.0:
        return False
    digest = hashlib.blake2b(repr((faults.seed, *what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < rate * 2.0**64


def slowed_step_s(faults: SimFaults, rank: int, step: int, step_s: float) -> float:
    """Seconds that one rank's step takes, its pauses included. Steps count from 1."""
    if strikes(faults, faults.slow_step_rate, "slow_step", rank, step):
        step_s *= faults.slow_step_factor
    if strikes(faults, faults.pause_rate, "pause", rank, step):
        step_s += faults.pause_s
    for pause in faults.pauses:
        if (pause.rank, pause.at_step) == (rank, step):
            step_s += pause.pause_s
    return step_s


def dies(faults: SimFaults, rank: int, step: int) -> bool:
    """True if the rank ends in this step."""
    death = faults.death
    return death is not None and (death.rank, death.at_step) == (rank, step)
