"""What a fingerprint leaves out: names that decide nothing about how steps run, each with why.

Reviewed by hand. What is not listed here counts, so an unknown setting or variable makes a
certificate not fit rather than pass unseen.
"""

from collections.abc import Mapping

ENV_PREFIXES = (
    "VLLM_", "NCCL_", "NVSHMEM_", "CUDA_", "CUBLAS", "CUDNN_", "TORCH", "PYTORCH_", "TRITON_",
    "DG_", "EP_", "DEEPEP_", "FLASHINFER_", "UCX_", "NIXL_", "GLOO_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "SPLITWAVE_",
    "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "DNNL_", "MKLDNN_", "ATEN_", "LD_LIBRARY_PATH", "LD_AUDIT",
    # What kernels of vLLM and torch read by other names:
    "INDUCTOR_", "AOT_INDUCTOR_", "CUTEDSL_", "CUTE_DSL_", "CUTLASS_", "ENABLE_PERSISTENT_TMA_",
    "ENABLE_TEMPLATE_TMA_", "ENABLE_TMA_", "FLA_", "FLASH_ATTENTION_", "FORCE_NUM_KV_SPLITS",
    "GDN_", "INKLING_", "LAMPORT_", "USE_DEFAULT_FLA_NORM", "USE_FLAGOS",
)  # fmt: skip
"""A set variable that begins with one of these counts, known or not, unless it is listed below.

Of NVIDIA_ only this one: others tell a container runtime which devices and libraries it shows.
"""

_ADDRESS = "an address"
_PATH = "a path: where, not what"
_WHICH_RANK = "which rank this is; that the ranks agree in all else is checked"
_REPORTING = "what is said, not what is done"
_SERVICE = "a service's setting; what it makes of an engine counts as vllm.*"
_FREE_MEMORY = "what is found free at start; grants count it"
_FRONT = "how many clients an engine has"
_MEASURED = "a duration"
_WRITER = "who wrote the file; the versions here count"

NEUTRAL: Mapping[str, str] = {
    "env.VLLM_HOST_IP": _ADDRESS,
    "env.VLLM_LOOPBACK_IP": _ADDRESS,
    "env.VLLM_PORT": _ADDRESS,
    "env.VLLM_RPC_BASE_PATH": _ADDRESS,
    "env.VLLM_NIXL_SIDE_CHANNEL_HOST": _ADDRESS,
    "env.VLLM_NIXL_SIDE_CHANNEL_PORT": _ADDRESS,
    "env.VLLM_P2P_SIDE_CHANNEL_HOST": _ADDRESS,
    "env.VLLM_P2P_SIDE_CHANNEL_PORT": _ADDRESS,
    "env.VLLM_EC_SIDE_CHANNEL_HOST": _ADDRESS,
    "env.VLLM_EC_SIDE_CHANNEL_PORT": _ADDRESS,
    "env.VLLM_MOONCAKE_BOOTSTRAP_PORT": _ADDRESS,
    "env.VLLM_DP_MASTER_IP": _ADDRESS,
    "env.VLLM_DP_MASTER_PORT": _ADDRESS,
    "env.VLLM_DIST_IDENT": "an id",
    "env.VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": "an id",
    "env.VLLM_DP_RANK": _WHICH_RANK,
    "env.VLLM_DP_RANK_LOCAL": _WHICH_RANK,
    "env.CUDA_VISIBLE_DEVICES": "which GPUs; their kind and number count",
    "env.VLLM_CONFIG_ROOT": _PATH,
    "env.VLLM_CACHE_ROOT": "a path; choices of kernels in it count as kernel.autotuned",
    "env.VLLM_ASSETS_CACHE": _PATH,
    "env.VLLM_XLA_CACHE_PATH": _PATH,
    "env.VLLM_DEBUG_DUMP_PATH": _PATH,
    "env.VLLM_TUNED_CONFIG_FOLDER": "a path; each file in it counts as kernel.tuned_here",
    "env.VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "a path; what a group uses of it counts as"
    " kernel.autotuned",
    "env.CUDA_CACHE_PATH": _PATH,
    "env.TORCH_HOME": _PATH,
    "env.TORCH_EXTENSIONS_DIR": _PATH,
    "env.TORCHINDUCTOR_CACHE_DIR": _PATH,
    "env.TRITON_CACHE_DIR": _PATH,
    "env.TRITON_DUMP_DIR": _PATH,
    "env.DG_JIT_CACHE_DIR": _PATH,
    "env.EP_JIT_CACHE_DIR": _PATH,
    "env.FLASHINFER_WORKSPACE_BASE": _PATH,
    "env.NCCL_DEBUG_FILE": _PATH,
    "env.ONEDNN_VERBOSE*": _REPORTING,
    "env.DNNL_VERBOSE*": _REPORTING,
    "env.VLLM_API_KEY": "a secret",
    "env.VLLM_NO_USAGE_STATS": _REPORTING,
    "env.VLLM_DO_NOT_TRACK": _REPORTING,
    "env.VLLM_USAGE_SOURCE": _REPORTING,
    "env.VLLM_USAGE_STATS_SERVER": _REPORTING,
    "env.VLLM_CONFIGURE_LOGGING": _REPORTING,
    "env.VLLM_LOGGING_*": _REPORTING,
    "env.VLLM_WORKER_MULTIPROC_METHOD": "how processes begin; what they run is in them",
    "env.VLLM_ENGINE_READY_TIMEOUT_S": "how long a client waits for a start",
    "env.SPLITWAVE_WAVE_EPOCH": "an id: the epoch of the group",
    "env.SPLITWAVE_RESTARTS": "how often this worker has started over",
    "env.SPLITWAVE_WEDGE_DIR": _PATH,
    "env.SPLITWAVE_ROUTER_*": _SERVICE,
    "env.SPLITWAVE_PREFILL_*": _SERVICE,
    "env.SPLITWAVE_DECODE_*": _SERVICE,
    "env.SPLITWAVE_UP_*": _SERVICE,
    "sim.group_id": "an id",
    "sim.epoch": "an id",
    "sim.model": "a label for clients",
    "vllm.model_config.model": "a path; the weights count by digest",
    "vllm.model_config.model_weights": "a path; the weights count by digest",
    "vllm.model_config.tokenizer": "a path; pools take and give token ids",
    "vllm.model_config.hf_config_path": "a path; the configuration itself counts",
    "vllm.model_config.hf_config._name_or_path": _PATH,
    "vllm.model_config.hf_config.transformers_version": _WRITER,
    "vllm.model_config.hf_text_config._name_or_path": _PATH,
    "vllm.model_config.hf_text_config.transformers_version": _WRITER,
    "vllm.model_config.served_model_name": "a label for clients",
    "vllm.model_config.hf_token": "a secret",
    "vllm.cache_config.num_gpu_blocks": _FREE_MEMORY,
    "vllm.cache_config.num_cpu_blocks": _FREE_MEMORY,
    "vllm.cache_config.kv_cache_size_tokens": _FREE_MEMORY,
    "vllm.cache_config.kv_cache_max_concurrency": _FREE_MEMORY,
    "vllm.parallel_config.data_parallel_rank": _WHICH_RANK,
    "vllm.parallel_config.data_parallel_rank_local": _WHICH_RANK,
    "vllm.parallel_config.data_parallel_index": _WHICH_RANK,
    "vllm.parallel_config.rank": _WHICH_RANK,
    "vllm.parallel_config.node_rank": _WHICH_RANK,
    "vllm.parallel_config.data_parallel_master_ip": _ADDRESS,
    "vllm.parallel_config.data_parallel_rpc_port": _ADDRESS,
    "vllm.parallel_config.data_parallel_master_port": _ADDRESS,
    "vllm.parallel_config._data_parallel_master_port_list*": _ADDRESS,
    "vllm.parallel_config._coord_store_port": _ADDRESS,
    "vllm.parallel_config.master_addr": _ADDRESS,
    "vllm.parallel_config.master_port": _ADDRESS,
    "vllm.parallel_config.assigned_physical_gpu_ids*": "which GPUs; their kind and number count",
    "vllm.parallel_config._api_process_count": _FRONT,
    "vllm.parallel_config._api_process_rank": _FRONT,
    "vllm.load_config.download_dir": _PATH,
    "vllm.load_config.use_tqdm_on_load": _REPORTING,
    "vllm.observability_config.otlp_traces_endpoint": _ADDRESS,
    "vllm.logging_config.*": _REPORTING,
    "vllm.profiler_config.torch_profiler_dir": _PATH,
    "vllm.profiler_config.proton_profiler_dir": _PATH,
    "vllm.compilation_config.debug_dump_path": _PATH,
    "vllm.compilation_config.cache_dir": _PATH,
    "vllm.compilation_config.local_cache_dir": _PATH,
    "vllm.compilation_config.compilation_time": _MEASURED,
    "vllm.compilation_config.encoder_compilation_time": _MEASURED,
    "vllm.compilation_config.traced_files*": "what was traced, unless a cache had it",
    "vllm.compilation_config.static_forward_context*": "the layers; they count as kernel.*",
    "vllm.kv_transfer_config.engine_id": "an id",
    "vllm.kv_transfer_config.kv_ip": _ADDRESS,
    "vllm.kv_transfer_config.kv_port": _ADDRESS,
    "vllm.instance_id": "an id",
}
"""By name, with the reason. `*` stands for any rest of a name."""


def is_neutral(name: str) -> bool:
    """True if `name` decides nothing about how steps run."""
    return name in NEUTRAL or name.startswith(_PREFIXES)


def counts(variable: str) -> bool:
    """True if an environment variable of this name is part of the fingerprint."""
    return variable.startswith(ENV_PREFIXES) and not is_neutral(f"env.{variable}")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that count, by their names in a fingerprint.

    Bytes that are no UTF-8 are written as escapes: a fingerprint is JSON.
    """
    return {f"env.{name}": _printable(value) for name, value in environ.items() if counts(name)}


def _printable(value: str) -> str:
    """`value`, in which the system put what it could not decode as surrogates, as plain text."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_PREFIXES = tuple(name.removesuffix("*") for name in NEUTRAL if name.endswith("*"))
