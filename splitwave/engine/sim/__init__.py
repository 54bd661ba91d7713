"""A lock-step simulator of a group of inference engines, behind the Engine port.

It computes no model: tokens are a hash of all tokens before them. Its steps,
seats, KV blocks, leases, pulls and failures are those of real engines.
"""

from splitwave.engine.sim.engine import SimEngine, start_sim_group
from splitwave.engine.sim.fabric import SimFabric
from splitwave.engine.sim.settings import RankDeath, RankPause, SimFaults, SimSettings
from splitwave.engine.sim.tokens import Completion, SimModel
from splitwave.engine.sim.vocabulary import write_vocabulary

__all__ = [
    "Completion",
    "RankDeath",
    "RankPause",
    "SimEngine",
    "SimFabric",
    "SimFaults",
    "SimModel",
    "SimSettings",
    "start_sim_group",
    "write_vocabulary",
]
