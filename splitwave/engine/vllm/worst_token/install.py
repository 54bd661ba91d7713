"""Puts a worst-token transport into vLLM's workers, at the seams that `fit` lists."""

import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any  # vLLM's objects are untyped here

from splitwave.engine.vllm.seams import check_seams
from splitwave.engine.vllm.switches import (
    WEDGE_DIR,
    collective_marks_wanted,
    collective_timeout_s,
)
from splitwave.engine.vllm.worst_token import fit, gate, handover, wedge
from splitwave.engine.vllm.worst_token.bridge import ElasticBridge, elastic_maker
from splitwave.engine.vllm.worst_token.collectives import ended_counts
from splitwave.engine.vllm.worst_token.elastic import ElasticTransport
from splitwave.engine.vllm.worst_token.legacy import LegacyTransport, buffer_maker
from splitwave.engine.vllm.worst_token.marks import DeviceMarks
from splitwave.engine.vllm.worst_token.transport import State, Transport

_MARK = "splitwave_worst_token"
state = State()
"""Of this process's worker."""


def install(name: str) -> None:
    """Wrap this process's vLLM for the transport of that name. Idempotent.

    Needs a GPU build; deep_ep only where engines run.
    """
    from vllm.config.compilation import CompilationConfig

    transport = Transport(name)
    if getattr(CompilationConfig, _MARK, False):
        return
    setattr(CompilationConfig, _MARK, True)
    CompilationConfig.set_splitting_ops_for_v1 = _graphs_kept(
        CompilationConfig.set_splitting_ops_for_v1
    )
    _install_buffers(transport)
    _install_runner(transport)


def _install_buffers(transport: Transport) -> None:
    from vllm.distributed.device_communicators import all2all

    manager = all2all.DeepEPHTAll2AllManager
    if transport is Transport.V2:
        whole = all2all.DeepEPV2All2AllManager
        whole.get_handle = _handed(
            whole.get_handle, lambda _manager, buffer: ElasticTransport(buffer, state)
        )
        manager.get_handle = _bridged
    else:
        manager.get_handle = _handed(
            manager.get_handle,
            lambda owner, buffer: _legacy(owner.cpu_group, buffer),
        )
    from vllm.model_executor.layers.fused_moe import all2all_utils

    if not hasattr(all2all_utils, "DeepEPHTPrepareAndFinalize"):
        return  # a process that runs no experts: vLLM imports the class where deep_ep is
    check_seams((fit.RECEIVER,))
    all2all_utils.DeepEPHTPrepareAndFinalize = _without_host_counts(
        all2all_utils.DeepEPHTPrepareAndFinalize
    )


def _install_runner(transport: Transport) -> None:
    from vllm.v1.engine.core import DPEngineCoreProc
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    ModelCudaGraphManager.__init__ = _gated(ModelCudaGraphManager.__init__, transport)
    ModelCudaGraphManager.capture = _watched_after(ModelCudaGraphManager.capture)
    ModelCudaGraphManager.run_fullgraph = _replayed(ModelCudaGraphManager.run_fullgraph)
    CudaGraphManager.capture = _recorded(CudaGraphManager.capture)
    model_runner.dispatch_cg_and_sync_dp = _agreed(model_runner.dispatch_cg_and_sync_dp)
    vote = "_has_global_unfinished_reqs"
    setattr(DPEngineCoreProc, vote, _in_phase("vote", getattr(DPEngineCoreProc, vote)))
    runner = model_runner.GPUModelRunner
    runner.profile_run = _reserving(runner.profile_run)
    _install_microbatches()


def _install_microbatches() -> None:
    from vllm.v1.worker.gpu import dp_utils

    handover.install()
    dp_utils.sync_cudagraph_and_dp_padding = handover.plain_when_one_is_empty(
        dp_utils.sync_cudagraph_and_dp_padding
    )


def _graphs_kept(decide: Callable[..., None]) -> Callable[..., None]:
    """vLLM takes graphs away from high-throughput because it knows it only as host-synced."""

    @functools.wraps(decide)
    def kept(self: Any, all2all_backend: str, data_parallel_size: int = 1) -> None:
        return decide(self, all2all_backend, 1)

    return kept


def _handed(get: Callable[..., Any], make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Hand out one transport for each of the manager's buffers, whichever layer asks."""
    made: dict[int, Any] = {}

    @functools.wraps(get)
    def handed(self: Any, kwargs: Any) -> Any:
        buffer = get(self, kwargs)
        if id(buffer) not in made:
            made[id(buffer)] = make(self, buffer)
        return made[id(buffer)]

    return handed


def _legacy(group: Any, buffer: Any) -> LegacyTransport:
    gate.check_hosts(int(buffer.runtime.get_num_rdma_ranks()))
    return LegacyTransport(buffer, buffer_maker(group), state)


def _bridged(self: Any, _kwargs: Any) -> ElasticBridge:
    """Give all layers one ElasticBuffer behind the legacy interface; no legacy buffer is made."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed.parallel_state import get_ep_group

    if not hasattr(self, _MARK):
        tokens_max = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        group = get_ep_group().device_group
        bridge = ElasticBridge(elastic_maker(group, tokens_max), tokens_max, group.size(), state)
        setattr(self, _MARK, bridge)
    found: ElasticBridge = getattr(self, _MARK)
    return found


def _without_host_counts(base: Any) -> Any:
    """The legacy prepare and finalize, but no host's list of counts where no host has counted."""

    class WorstTokenDeepEPHT(base):
        def _receiver(self, *args: Any, **kwargs: Any) -> Any:
            rows, scales, counts, ids, weights = super()._receiver(*args, **kwargs)
            if state.is_worst() or not counts.expert_num_tokens_cpu.numel():
                counts = None  # Experts that trust an empty list would compute nothing.
            return rows, scales, counts, ids, weights

    return WorstTokenDeepEPHT


def _gated(init: Callable[..., None], transport: Transport) -> Callable[..., None]:
    @functools.wraps(init)
    def gated(
        self: Any, vllm_config: Any, device: Any, cudagraph_mode: Any, *a: Any, **k: Any
    ) -> None:
        gate.check(resolved(vllm_config, cudagraph_mode), transport)
        if collective_marks_wanted() and not isinstance(state.marks, DeviceMarks):
            state.marks = DeviceMarks(device)
        init(self, vllm_config, device, cudagraph_mode, *a, **k)

    return gated


def resolved(vllm_config: Any, cudagraph_mode: Any) -> gate.Resolved:
    """Read off vLLM's configuration what the gate's rules are about."""
    parallel = vllm_config.parallel_config
    return gate.Resolved(
        cudagraph_mode=cudagraph_mode.name,
        capture_sizes=tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()),
        sequences_max=vllm_config.scheduler_config.max_num_seqs,
        batch_max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        ranks=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        breakable_graphs=os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1",
        microbatched=parallel.use_ubatching,
        backend=parallel.all2all_backend,
        data_parallel_runner_v2=vllm_config.use_v2_model_runner,
    )


def _recorded(capture: Callable[..., None]) -> Callable[..., None]:
    """Take the graph's path in each graph's warm-up too, and count what each graph holds."""

    @functools.wraps(capture)
    def recorded(self: Any, create_forward_fn: Callable[..., Any], *a: Any, **k: Any) -> None:
        def create(desc: Any, warmup: bool) -> Callable[[Any], Any]:
            return _as_graph(create_forward_fn(desc, warmup=warmup), desc)

        capture(self, create, *a, **k)

    return recorded


def _as_graph(forward: Callable[[Any], Any], desc: Any) -> Callable[[Any], Any]:
    def run(mode: Any) -> Any:
        import torch

        capturing = torch.cuda.is_current_stream_capturing()
        state.warming = True
        if capturing:
            state.log.begin_recording(desc)
        try:
            return forward(mode)
        finally:
            state.warming = False
            if capturing:
                state.log.end_recording()

    return run


def _watched_after(capture: Callable[..., None]) -> Callable[..., None]:
    """Once graphs are captured: nothing may move under them, and waits are bounded."""

    @functools.wraps(capture)
    def watched(self: Any, *a: Any, **k: Any) -> None:
        capture(self, *a, **k)
        if self._capture_mem_samples is not None:
            return  # vLLM measures what graphs take; it captures them again afterwards
        _align_counts()
        gc.collect()
        gc.freeze()
        if not state.watched:
            state.watched = True
            _start_watch(self.vllm_config.parallel_config)

    return watched


def _align_counts() -> None:
    """From here on what was launched and what has ended are counted from the same start."""
    import torch

    torch.cuda.synchronize()
    state.log.align(ended_counts(state.marks.read()))


def _start_watch(parallel: Any) -> None:
    directory = Path(os.environ.get(WEDGE_DIR) or tempfile.gettempdir())
    counts = isinstance(state.marks, DeviceMarks)
    latest = wedge.Latest(state.marks.read)
    watch = wedge.WedgeWatch(
        state.log, latest.counts, timeout_s=collective_timeout_s(), counts=counts
    )
    place = wedge.Place(
        rank=parallel.data_parallel_rank,
        ranks=parallel.data_parallel_size,
        directory=directory,
    )
    wedge.start(watch, place, latest)


def _replayed(replay: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(replay)
    def replayed(self: Any, desc: Any) -> Any:
        state.log.replayed(desc)
        state.replays_in_flight = True
        return replay(self, desc)

    return replayed


def _agreed(agree: Callable[..., Any]) -> Callable[..., Any]:
    """All ranks agree on a step's shape here, so here a rank waits for one that has stopped."""

    @functools.wraps(agree)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        state.log.enter("agree", time.monotonic())
        try:
            found = agree(*args, **kwargs)
        finally:
            state.log.enter("launch", time.monotonic())
        desc = found[0]
        kind = desc.cg_mode.name.lower() if desc.cg_mode.value else "eager"
        if desc.num_ubatches > 1:
            kind = f"ubatched_{kind}"
        state.log.step(kind, int(desc.num_tokens))
        return found

    return agreed


def _in_phase(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def within(*args: Any, **kwargs: Any) -> Any:
        state.log.enter(phase, time.monotonic())
        try:
            return call(*args, **kwargs)
        finally:
            state.log.enter("idle", time.monotonic())

    return within


def _reserving(profile: Callable[..., Any]) -> Callable[..., Any]:
    """Profile with the worst-case rows, so that the expert workspace is reserved for them.

    A host-synced profile run may receive few rows; the workspace would then grow later, under
    graphs that hold its old address, or not at all once vLLM has locked it.
    """

    @functools.wraps(profile)
    def reserving(self: Any, *args: Any, **kwargs: Any) -> Any:
        state.warming = True
        try:
            return profile(self, *args, **kwargs)
        finally:
            state.warming = False

    return reserving


def report() -> dict[str, Any]:
    """Say what this worker's graphs hold and what it has launched, for tests and benchmarks."""
    return {
        "graphs": state.log.collectives_a_graph(),
        "replays": state.log.replays,
        "steps": state.log.steps,
        "drains": state.drains,
    }
