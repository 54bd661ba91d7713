"""What the rules of modes are asked about: a group's settings, and what vLLM made of them."""

from collections.abc import Mapping
from typing import Any  # vLLM's configuration is untyped here

from splitwave.core.mode import Mode, StepKind
from splitwave.core.mode_rules import NO_GRAPHS, Combination
from splitwave.engine.port import Role
from splitwave.engine.vllm.config import VllmGroupSettings, batch_grid

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def asked(settings: VllmGroupSettings, mode: Mode, environ: Mapping[str, str]) -> Combination:
    """The combination that settings ask for."""
    compilation = mode.vllm_args.get("compilation_config", {})
    assert isinstance(compilation, Mapping)
    compiled = StepKind.COMPILED in mode.step_kinds
    return Combination(
        role=settings.role,
        ranks=settings.ranks,
        expert_parallel=settings.expert_parallel,
        seats_max=settings.seats_max,
        step_max_tokens=settings.seats_max if compiled else settings.batch_max_tokens,
        capture_grid=batch_grid(settings, mode),
        cudagraph_mode=str(compilation.get("cudagraph_mode", NO_GRAPHS)),
        microbatches=bool(mode.vllm_args.get("enable_dbo", False)),
        features=frozenset(
            name
            for name, is_on in (
                ("prefix_caching", settings.prefix_caching),
                ("breakable_graphs", environ.get(BREAKABLE) == "1"),
            )
            if is_on
        ),
        arguments=mode.vllm_args,
    )


def made(role: Role, mode: Mode, vllm_config: Any, environ: Mapping[str, str]) -> Combination:
    """The combination that a VllmConfig is. `environ`: after vLLM has resolved it."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    return Combination(
        role=role,
        ranks=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        seats_max=scheduler.max_num_seqs,
        step_max_tokens=scheduler.max_num_batched_tokens,
        capture_grid=resolved_grid(mode, vllm_config),
        cudagraph_mode=compilation.cudagraph_mode.name,
        microbatches=bool(parallel.enable_dbo),
        features=frozenset(
            name
            for name, is_on in (
                ("prefix_caching", vllm_config.cache_config.enable_prefix_caching),
                ("breakable_graphs", environ.get(BREAKABLE) == "1"),
                ("speculative_decoding", vllm_config.speculative_config is not None),
                ("eplb", parallel.enable_eplb),
                ("lora", vllm_config.lora_config is not None),
                ("pipeline_parallel", parallel.pipeline_parallel_size > 1),
            )
            if is_on
        ),
        arguments={
            "all2all_backend": parallel.all2all_backend,
            "async_scheduling": scheduler.async_scheduling,
            # Its cudagraph mode has rules of its own, above.
            "compilation_config": {"mode": int(compilation.mode)},
            "dbo_prefill_token_threshold": parallel.dbo_prefill_token_threshold,
            "distributed_executor_backend": parallel.distributed_executor_backend,
            "dp_sync_interval": parallel.dp_sync_interval,
            "enable_dbo": bool(parallel.enable_dbo),
            "enforce_eager": model.enforce_eager,
        },
    )


def resolved_grid(mode: Mode, vllm_config: Any) -> tuple[int, ...]:
    """The batch sizes that engines of this configuration capture or warm up, ascending."""
    if mode.captures_graphs:
        return tuple(sorted(vllm_config.compilation_config.cudagraph_capture_sizes or ()))
    if StepKind.COMPILED in mode.step_kinds:
        return tuple(range(1, vllm_config.scheduler_config.max_num_seqs + 1))
    return ()
