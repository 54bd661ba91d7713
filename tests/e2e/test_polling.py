"""A pull over NIXL from an engine that is away in a long step, without NIXL's progress thread."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any  # NIXL is untyped

import numpy as np
import pytest

from splitwave.engine.vllm.polling import SharedAgent
from splitwave.engine.vllm.progress import POLL_S

STEP_S = 4.0
"""How long the engine that is read is away."""
BYTES = 8 * 2**20

pytestmark = pytest.mark.timeout(200)


def agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config  # spawned processes alone pay for it

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False))


def memory(agent: Any, fill: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    found = np.full(BYTES, fill, dtype=np.uint8)
    agent.register_memory([(found.ctypes.data, found.nbytes, 0, "")], "DRAM")
    return found


def prefill(reader: Connection, polls: bool) -> None:
    """Hold a prompt's KV, take a long step as soon as it is read, and poll after it."""
    alone = agent("prefill")
    held = memory(alone, 1)
    reader.send((alone.get_agent_metadata(), held.ctypes.data))
    engine = SharedAgent(alone, POLL_S) if polls else alone
    reader.recv()
    time.sleep(STEP_S)
    while not reader.poll(0):
        engine.get_new_notifs()
        time.sleep(0.01)
    os._exit(0)  # NIXL's threads would hold an orderly exit up.


def decode(holder: Connection, result: Connection) -> None:
    """Pull it, and say how long that took and whether the bytes are right."""
    own = agent("decode")
    pulled = memory(own, 0)
    metadata, address = holder.recv()
    peer = own.add_remote_agent(metadata)
    local = own.get_xfer_descs([(pulled.ctypes.data, BYTES, 0)], "DRAM")
    remote = own.get_xfer_descs([(address, BYTES, 0)], "DRAM")
    pull = own.initialize_xfer("READ", local, remote, peer, b"done")
    holder.send("reads")
    began_s = time.monotonic()
    state = own.transfer(pull)
    while state not in ("DONE", "ERR"):
        time.sleep(0.001)
        state = own.check_xfer_state(pull)
    result.send((state, time.monotonic() - began_s, bool((pulled == 1).all())))
    holder.send("over")
    os._exit(0)


def pull_s(*, polls: bool) -> float:
    """Seconds that the pull took."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    heard, said = spawn.Pipe()
    processes = [
        spawn.Process(target=prefill, args=(ours, polls)),
        spawn.Process(target=decode, args=(theirs, said)),
    ]
    for process in processes:
        process.start()
    try:
        assert heard.poll(120.0), "nothing was pulled"
        state, took_s, right = heard.recv()
    finally:
        for process in processes:
            process.kill()
            process.join(10.0)
    assert (state, right) == ("DONE", True)
    return float(took_s)


def test_a_pull_does_not_wait_for_the_end_of_a_long_step() -> None:
    assert pull_s(polls=True) < STEP_S / 2


def test_without_the_polls_it_does() -> None:
    assert pull_s(polls=False) > STEP_S - 0.5
