"""First starts at the same time agree on this machine's one key."""

import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from services.cli.machine import Machine
from splitwave.certify.keys import BadKey, load_signing_key, load_trust_store

PROCESSES, ROUNDS = 3, 60
TOGETHER_S = 15.0


def race(home: Path, together: Barrier, told: "Queue[list[str]]") -> None:
    """Make the key of each round's home when the others do; say which it was, or what failed."""
    found = []
    for number in range(ROUNDS):
        machine = Machine(home / str(number))
        together.wait(TOGETHER_S)
        try:
            key_id = machine.make_key().public.key_id
            load_trust_store(machine.trust)
        except BadKey as error:
            key_id = f"refused: {error}"
        found.append(key_id)
    told.put(found)


def test_processes_that_make_the_machine_key_at_once_have_the_same_one(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")  # As commands are: nothing is shared.
    together, told = spawn.Barrier(PROCESSES), spawn.Queue()
    racers = [
        spawn.Process(target=race, args=(tmp_path, together, told), daemon=True)
        for _ in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    rounds = zip(*[told.get(timeout=TOGETHER_S) for _ in racers], strict=True)
    for racer in racers:
        racer.join(TOGETHER_S)

    for number, keys in enumerate(rounds):
        machine = Machine(tmp_path / str(number))
        kept = load_signing_key(machine.key).public.key_id
        assert set(keys) == {kept}
        assert load_trust_store(machine.trust).keys.keys() == {kept}
        assert len(list(machine.key.parent.iterdir())) == 2, "the key and its public half alone"
