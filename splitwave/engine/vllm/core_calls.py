"""Calls that Splitwave adds to vLLM's engine core, reached by `call_utility_async(name, ...)`.

They run in the core's loop, between two steps, so they see and change its state without locks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any  # vLLM's objects are untyped here

from splitwave.engine.vllm import fingerprint
from splitwave.engine.vllm.eagerly import compile_nothing_more
from splitwave.engine.vllm.fingerprint import splitwave_fingerprint
from splitwave.engine.vllm.guard import GuardMixin


def splitwave_release(core: Any, request_ids: Sequence[str]) -> None:
    """Free what these requests hold, with the next step, which comes even when idle.

    A finished prefill's lease ends; a request that still runs is aborted. Ids that hold nothing
    or are unknown are ignored, so it may be repeated.
    """
    scheduler = core.scheduler
    running = [x for x in request_ids if _is_unfinished(scheduler.requests.get(x))]
    if running:
        core.abort_requests(running)
    if scheduler.get_kv_connector() is not None:
        scheduler.get_kv_connector().handoffs.release(request_ids)


def splitwave_counters(core: Any) -> dict[str, Any]:
    """What this rank has done since it started: `RankCounters` without its rank, by field."""
    scheduler = core.scheduler
    connector = scheduler.get_kv_connector()
    handoffs = connector.handoffs if connector is not None else None
    pool = scheduler.kv_cache_manager.block_pool
    refusals = scheduler.guard_refusals if isinstance(scheduler, GuardMixin) else {}
    return {
        **_first_worker_steps(core),
        "pulls": handoffs.pulls if handoffs else 0,
        "bytes_pulled": handoffs.bytes_pulled if handoffs else 0,
        "leases_live": handoffs.leases_live if handoffs else 0,
        "blocks_used": _usable_blocks(pool) - pool.get_num_free_blocks(),
        "guard_refusals": dict(refusals),
    }


def splitwave_facts(core: Any) -> dict[str, Any]:
    """The KV cache of this rank: usable blocks, bytes a block, and what its layout is made of.

    Two caches with equal `layout` can hand blocks to each other.
    """
    config, groups = core.vllm_config, core.scheduler.kv_cache_config.transfer_groups
    model, cache = config.model_config, config.cache_config
    workers = config.parallel_config.tensor_parallel_size
    return {
        "blocks": _usable_blocks(core.scheduler.kv_cache_manager.block_pool),
        "block_bytes": sum(_group_block_bytes(group) for group in groups) * workers,
        "layout": {
            "architecture": ",".join(model.architectures),
            "dtype": str(model.dtype).removeprefix("torch."),
            "cache_dtype": str(cache.cache_dtype),
            "block_size_tokens": cache.block_size,
            "layers": model.get_total_num_hidden_layers(),
            "kv_heads": model.get_total_num_kv_heads(),
            "head_size": model.get_head_size(),
            "tensor_parallel_size": workers,
            "memory_layout": str(core.scheduler.kv_cache_config.kv_cache_layout),
            "groups": [type(group.kv_cache_spec).__name__ for group in groups],
        },
    }


def splitwave_warm(core: Any) -> "Future[None] | None":
    """Run one dummy step, if this rank has not stepped yet.

    Of several data-parallel ranks all have to be called at about the same time: they start
    a wave without requests, run one step in lock-step, agree that there is no work, and pause.
    Answers when this rank has paused again.
    """
    compile_nothing_more(core.vllm_config)  # Here an eager CPU rank's worker steps, too.
    if any(_first_worker_steps(core)["steps_by_kind"].values()):
        return None
    if not hasattr(core, "dp_group"):
        core.execute_dummy_batch()
        return None
    stepped: Future[None] = Future()
    core._idle_state_callbacks.append(  # noqa: SLF001  # the way vLLM pauses
        lambda _core: stepped.set_result(None)
    )
    core.engines_running = True
    return stepped


CALLS: tuple[Callable[..., Any], ...] = (
    splitwave_release,
    splitwave_counters,
    splitwave_facts,
    splitwave_fingerprint,
    splitwave_warm,
)


def install() -> None:
    """Add the calls to EngineCore in this process. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    for call in CALLS:
        setattr(EngineCore, call.__name__, call)
    fingerprint.install()


def _is_unfinished(request: Any) -> bool:  # vLLM's Request, or None
    return request is not None and not request.is_finished()


def _first_worker_steps(core: Any) -> dict[str, Any]:
    """Workers of one rank step together; the first one's counts are the rank's."""
    reports: list[dict[str, Any]] = core.collective_rpc("splitwave_steps")
    return reports[0]


def _usable_blocks(pool: Any) -> int:  # vLLM's BlockPool, whose first block is a placeholder
    usable: int = pool.num_gpu_blocks - 1
    return usable


def _group_block_bytes(group: Any) -> int:  # vLLM's KVCacheGroupSpec
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", None)
    if by_layer is not None:
        return sum(layer.page_size_bytes for layer in by_layer.values())
    total: int = spec.page_size_bytes * len(group.layer_names)
    return total
