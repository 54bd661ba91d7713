"""What the connector's two halves tell each other, with each step.

Scheduler to workers: which handoffs are released. Workers to scheduler: the bytes of each pull.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata


class HandoffMetadata(NixlConnectorMetadata):
    """vLLM's NIXL metadata of one step, and the request ids whose handoffs end by release."""

    def __init__(self, stock: NixlConnectorMetadata, released: frozenset[str]) -> None:
        super().__init__()
        self.__dict__.update(stock.__dict__)
        self.released = released


@dataclass
class PulledBytes(KVConnectorWorkerMetadata):
    """Bytes that NIXL moved since the last step, by request id; a sum once aggregated."""

    by_request: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PulledBytes:
        """Add what another worker of the same rank moved."""
        assert isinstance(other, PulledBytes)
        total = dict(self.by_request)
        for request_id, count in other.by_request.items():
            total[request_id] = total.get(request_id, 0) + count
        return PulledBytes(total)
