"""What a handoff costs: KV from one engine's cache to another's, and the fence.

Two processes, each with an engine's real KV cache and our connector's worker half, registered with
NIXL as engines do it. Decode's side reads blocks of prefill's as a pull reads them: the handshake,
descriptors, posting and polling are the connector's own, only no scheduler steps beside them. What
the link can do is measured in the same run by plain copies.

    python -m bench.handoff --device cpu --gib-max 0.5 > bench/results/handoff_cpu.json
"""
