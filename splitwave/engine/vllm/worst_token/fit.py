"""Where vLLM is wrapped for worst-token dispatch; `seams` tests them at start."""

from splitwave.engine.vllm.seams import Seam

_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"


def _seam(where: str, parameters: str) -> Seam:
    return Seam(where, tuple(parameters.split()))


RECEIVER = _seam(
    "vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht:"
    "DeepEPHTPrepareAndFinalize._receiver",
    "self event has_scales token_data expert_topk_ids num_experts "
    "expert_num_tokens_per_expert_list expert_topk_weights a1_scale quant_config "
    "defer_input_quant",
)
"""Where deep_ep is: vLLM's module imports it."""

MICROBATCHES = (
    _seam(
        "vllm.v1.worker.gpu.ubatch_utils:UBatchRunner",
        "vllm_config device model_state attn_groups kv_cache_config max_num_reqs",
    ),
    _seam("vllm.v1.worker.ubatching:UBatchContext.__exit__", "self exc_type exc_val exc_tb"),
    _seam(
        "vllm.v1.worker.gpu.ubatch_utils:make_ubatch_contexts",
        "num_micro_batches compute_stream comm_stream forward_contexts ready_barrier schedule",
    ),
)
"""Where microbatch threads wait for one another."""

SEAMS = (
    _seam(
        "vllm.config.compilation:CompilationConfig.set_splitting_ops_for_v1",
        "self all2all_backend data_parallel_size",
    ),
    _seam(
        "vllm.distributed.device_communicators.all2all:DeepEPV2All2AllManager.get_handle",
        "self kwargs",
    ),
    _seam(
        "vllm.distributed.device_communicators.all2all:DeepEPHTAll2AllManager.get_handle",
        "self kwargs",
    ),
    _seam(
        f"{_GRAPHS}:CudaGraphManager.capture",
        "self create_forward_fn progress_bar_desc",
    ),
    _seam(
        f"{_GRAPHS}:ModelCudaGraphManager",
        "vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode "
        "ubatch_runner",
    ),
    _seam(
        "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp",
        "cudagraph_manager num_reqs num_tokens uniform_token_count dp_size dp_rank max_query_len "
        "need_eager num_active_loras parallel_config allow_ubatching uniform_decode dp_sync_state",
    ),
    _seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run", "self randomize_inputs"),
    _seam(f"{_GRAPHS}:ModelCudaGraphManager.run_fullgraph", "self desc"),
    _seam("vllm.v1.worker.ubatching:dbo_current_ubatch_id", ""),
    _seam("vllm.v1.worker.ubatching:dbo_enabled", ""),
    *MICROBATCHES,
    _seam(
        "vllm.v1.worker.gpu.dp_utils:sync_cudagraph_and_dp_padding",
        "cudagraph_manager desired_batch_desc num_tokens num_reqs uniform_token_count dp_size "
        "dp_rank max_query_len num_active_loras parallel_config allow_ubatching uniform_decode",
    ),
)
