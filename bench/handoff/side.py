"""One side of the handoff: an engine's KV cache and our connector's worker half, told what to do.

It reads one JSON command a line from its standard input and answers each with a line on the file
descriptor that it was given: everything else that libraries print goes to its log.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any  # vLLM's objects are untyped here, and commands are JSON

POLL_S = 20e-6
"""Between two looks at a transfer; an engine looks once a step."""
LEASE_S = 600
NOT_PULLED = -1.0
PULL_MAX_S = 60.0


class Side:
    """The engine core of one role, of which only the cache and the connector are used."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.config = EngineArgs(
            **spec["arguments"], kv_transfer_config=KVTransferConfig(**spec["transfer"])
        ).create_engine_config()
        executor = Executor.get_class(self.config)
        self.core = EngineCore(self.config, executor, log_stats=False)
        self.connector = get_kv_transfer_group()
        self.worker = self.connector.connector_worker
        self.caches: dict[str, Any] = self.worker.device_kv_caches
        self._numbers = itertools.count()

    def facts(self) -> dict[str, Any]:
        """Where the other side finds this one, and what its cache is."""
        first = next(iter(self.caches.values()))
        return {
            "engine_id": self.worker.engine_id,
            "blocks": int(self.worker.num_blocks),
            "layers": len(self.caches),
            "device": str(first.device),
            "memory": self.worker.nixl_memory_type,
            "host_buffer": bool(self.worker.use_host_buffer),
            "connector": type(self.connector).__name__,
            "cores": len(os.sched_getaffinity(0)),
            "block_bytes": sum(
                cache.untyped_storage().nbytes() for cache in _storages(self.caches.values())
            )
            // int(self.worker.num_blocks),
        }

    def fill(self, seed: int) -> dict[str, Any]:
        """Give every byte of the cache a value of its own storage, place and seed."""
        import torch

        for number, cache in enumerate(_storages(self.caches.values())):
            flat = _bytes(cache)
            place = torch.arange(len(flat) // 8, device=flat.device, dtype=torch.int64)
            flat.view(torch.int64).copy_(place * 2654435761 + number * 40503 + seed)
        return {}

    def sums(self, blocks: list[int]) -> dict[str, Any]:
        """A digest of each of these blocks over all layers, of their bytes in place."""
        import torch

        total = torch.zeros(len(blocks), dtype=torch.int64)
        for cache in _unique(self.caches.values()):
            rows = self._by_block(cache)[blocks].contiguous().view(torch.uint8)
            words = rows.reshape(len(blocks), -1).view(torch.int32).to(torch.int64)
            weights = torch.arange(1, words.shape[1] + 1, device=words.device) % 8191
            total = total * 31 + (words * weights).sum(1).cpu()
        return {"sums": total.tolist()}

    def _by_block(self, cache: Any) -> Any:
        """A layer's cache with the blocks first."""
        blocks = int(self.worker.num_blocks)
        axis = next(place for place, size in enumerate(cache.shape) if size == blocks)
        return cache.movedim(axis, 0)

    def lend(self, names: list[str]) -> dict[str, Any]:
        """Prefill: begin the leases of these requests, as a step with them would."""
        metadata = self._metadata()
        metadata.reqs_in_batch = set(names)
        metadata.reqs_to_send = {name: time.perf_counter() + LEASE_S for name in names}
        self.worker.start_load_kv(metadata)
        return {}

    def returned(self, names: list[str], within_s: float) -> dict[str, Any]:
        """Prefill: poll until these leases have ended by their pull's notification."""
        left, until_s = set(names), time.monotonic() + within_s
        while left and time.monotonic() < until_s:
            left -= self.worker.get_transfer_results().finished_sending
            time.sleep(POLL_S)
        return {"missing": sorted(left)}

    def pull(self, remote: Mapping[str, Any], names: list[str], blocks: list[list[int]]) -> Any:
        """Decode: read these blocks of prefill's, each request's after the one before it."""
        seconds, moved = [], []
        for name, ids in zip(names, blocks, strict=True):
            metadata = self._metadata()
            own = f"pull-{next(self._numbers)}"
            metadata.add_new_req_to_recv(
                own,
                (list(ids),),
                {
                    "remote_block_ids": (list(ids),),
                    "remote_engine_id": remote["engine_id"],
                    "remote_request_id": name,
                    "remote_host": "127.0.0.1",
                    "remote_port": remote["port"],
                    "tp_size": 1,
                },
                awaiting_kvs=True,
            )
            began_s = time.perf_counter()
            self.worker.start_load_kv(metadata)
            self._await(own)
            seconds.append(time.perf_counter() - began_s)
            pulled = self.worker.take_pulled_bytes()
            moved.append(pulled.by_request.get(own, 0) if pulled else 0)
        return {"seconds": seconds, "bytes": moved}

    def _await(self, own: str) -> None:
        until_s = time.monotonic() + PULL_MAX_S
        while True:
            found = self.worker.get_transfer_results()
            if own in found.failed_recving or time.monotonic() > until_s:
                raise RuntimeError(f"{own} failed, or took {PULL_MAX_S:.0f} s: {found}")
            if own in found.finished_recving:
                return
            # A handshake that has ended leaves its request to the next step.
            if not self.worker._ready_requests.empty():  # noqa: SLF001  # what the next step takes
                self.worker.start_load_kv(self._metadata())
            time.sleep(POLL_S)

    def _metadata(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
            NixlConnectorMetadata,
        )

        from splitwave.engine.vllm.connector.messages import HandoffMetadata

        return HandoffMetadata(NixlConnectorMetadata(), frozenset())


def chosen(blocks: int, of: int, pattern: str, seed: int) -> list[int]:
    """Block numbers: `row` one after the other, `scattered` as a used pool gives them.

    Block 0 is vLLM's placeholder.
    """
    if pattern == "row":
        return list(range(1, blocks + 1))
    return random.Random(seed).sample(range(1, of), blocks)


def _unique(caches: Iterable[Any]) -> list[Any]:
    return list({cache.data_ptr(): cache for cache in caches}.values())


def _storages(caches: Iterable[Any]) -> list[Any]:
    """One tensor of each stretch of memory that caches lie in."""
    return list({cache.untyped_storage().data_ptr(): cache for cache in caches}.values())


def _bytes(cache: Any) -> Any:
    """All bytes of the memory that a cache lies in."""
    import torch

    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        storage, 0, (storage.nbytes() // 8 * 8,)
    )


def main() -> None:
    """Serve commands until the input ends."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = os.fdopen(int(sys.argv[2]), "w")

    def tell(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        side = Side(spec)
        tell(side.facts())
        for line in sys.stdin:
            command = json.loads(line)
            tell(getattr(side, command.pop("do"))(**command))
    except BaseException as error:  # the parent is told whatever it was
        tell({"failed": f"{type(error).__name__}: {error}"})
        raise
    finally:
        sys.stderr.flush()
        os._exit(0)  # Libraries that hang while they are torn down are no finding.


if __name__ == "__main__":
    main()
