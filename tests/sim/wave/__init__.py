"""The waves of one group in virtual time, by seed: faults, invariants, coverage, replay.

`python -m tests.sim.wave SEED` prints one schedule as it runs.
"""
