"""The KV connector of both pools: vLLM's NIXL pull connector, and what a handoff needs of it.

vLLM finds it by name: `KVTransferConfig(kv_connector="SplitwaveNixlConnector",
kv_connector_module_path="splitwave.engine.vllm.connector")`.
"""

from splitwave.engine.vllm.connector.nixl import SplitwaveNixlConnector

__all__ = ["SplitwaveNixlConnector"]
