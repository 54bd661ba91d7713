"""Settings of one engine group, checked and turned into vLLM's arguments. Imports no vLLM.

How steps are executed comes from `splitwave.core.mode`; everything else comes from here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitwave.core.mode import Device, Mode
from splitwave.engine.port import Role
from splitwave.engine.vllm.kernels import TUNED_FOLDER
from splitwave.engine.vllm.switches import MODE

CONNECTOR = "SplitwaveNixlConnector"
CONNECTOR_MODULE = "splitwave.engine.vllm.connector"
GUARD = "splitwave.engine.vllm.guard.GuardScheduler"
GUARD_ASYNC = "splitwave.engine.vllm.guard.AsyncGuardScheduler"

KV_BYTES_MIN = 64 * 2**20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGPROBS_MAX = 20
TUNED = Path(__file__).parent / "moe_configs"
"""Tiles of the expert kernel that `bench.tune_moe` has found, by shape and device."""


class SettingsError(ValueError):
    """A setting that cannot work. The message names the field and the fix."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGroupSettings:
    """One group of vLLM engines on this host. Times in seconds, sizes in bytes or tokens."""

    role: Role
    mode: str
    """An execution mode of `splitwave.core.mode` for this role."""
    model_path: Path
    """A model directory as transformers saves it."""
    served_model: str
    group_id: str
    epoch: int
    log_dir: Path
    """Engine processes write their output here, one file a rank."""
    ranks: int = 1
    """Data-parallel ranks."""
    tensor_parallel: int = 1
    expert_parallel: bool = False
    dtype: str = "float32"
    block_size_tokens: int = 32
    kv_cache_bytes: int | None = None
    """KV cache of one rank. None: room for a quarter of the seats at full length, 64 MiB at least;
    on GPUs what vLLM finds free."""
    gpu_memory_share: float | None = None
    """GPU modes: share of each device's memory that a rank takes, weights included; None: vLLM's
    0.92. Groups that share devices need shares that leave room for each other."""
    devices: str = ""
    """GPU modes: numbers of the devices that this group may use, spaces between, such as `0 1`;
    rank n takes the n-th, or the n-th `tensor_parallel` of them. Empty: all that are visible.
    `0 0` has ranks share a device, which shows that a group is right, not how fast it is."""
    blocks_override: int | None = None
    """Exact number of KV blocks of one rank, to force scarcity."""
    seats_max: int = 16
    model_len_max_tokens: int = 1024
    batch_max_tokens: int = 2048
    lease_ttl_s: int = 30
    """How long prefill holds a finished prompt's blocks. vLLM counts in whole seconds."""
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 5600
    """First of `ranks` ports on which ranks describe their memory to the other side."""
    data_parallel_rpc_port: int | None = None
    threads_per_rank: int = 1
    capture_sizes: str = ""
    """Graph modes: batch sizes to capture, spaces between, such as `8 16 24`. Empty: dense, up to
    seats_max."""
    prefix_caching: bool = False
    """Prefill only: share the KV of equal prompt beginnings."""
    seed: int = 0
    start_timeout_s: float = 300.0
    close_grace_s: float = 5.0
    """Given to engine processes to end by themselves before they are killed."""

    @property
    def side_channel_ports(self) -> range:
        """The ports that this group's ranks listen on."""
        return range(self.side_channel_port, self.side_channel_port + self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the settings are checked against, read from the model's config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    """0 for a dense model."""
    length_max_tokens: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def read_shape(model_path: Path) -> ModelShape:
    """Read a model directory's config.json; SettingsError if it is not one of a decoder model."""
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(
            "model_path", f"{path} does not exist; give the directory of a saved model"
        ) from None
    except ValueError as error:
        raise SettingsError("model_path", f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError("model_path", f"{path} holds no JSON object: not a decoder model")
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            experts=_experts(config),
            length_max_tokens=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise SettingsError("model_path", f"{path} lacks {error}: not a decoder model") from None


def _experts(config: Mapping[str, object]) -> int:
    """Count the routed experts of a layer, by whichever name the architecture uses."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if isinstance(found := config.get(name), int):
            return found
    return 0


def blocks_for(tokens: int, settings: VllmGroupSettings) -> int:
    """Count the KV blocks that hold `tokens`."""
    return math.ceil(tokens / settings.block_size_tokens)


def block_bytes(settings: VllmGroupSettings, shape: ModelShape) -> int:
    """Return the bytes of one KV block of one rank."""
    return settings.block_size_tokens * shape.kv_bytes_per_token(settings.dtype)


def kv_cache_bytes(settings: VllmGroupSettings, shape: ModelShape) -> int:
    """Return the KV cache size of one rank: as set, or room for a quarter of the seats."""
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    full_length = blocks_for(settings.model_len_max_tokens, settings) + 1
    seats = math.ceil(settings.seats_max / 4)
    return max(KV_BYTES_MIN, seats * full_length * block_bytes(settings, shape))


def batch_grid(settings: VllmGroupSettings, mode: Mode) -> tuple[int, ...]:
    """The batch sizes to capture or to warm up; empty in an eager mode.

    As the settings have them, or dense so that the largest holds every seat.
    """
    if settings.capture_sizes:
        words = settings.capture_sizes.replace(",", " ").strip("[] ").split()
        if not all(word.isdecimal() for word in words):
            problem = f"are {settings.capture_sizes!r}; write whole numbers with spaces between"
            raise SettingsError("capture_sizes", problem)
        return tuple(int(word) for word in words)
    return mode.dense_grid(settings.seats_max)


def device_numbers(settings: VllmGroupSettings) -> tuple[int, ...]:
    """The device of each rank, in order; empty if rank n takes the n-th that is visible.

    A number that stands twice is shared by those ranks.
    """
    words = settings.devices.replace(",", " ").strip("[] ").split()
    if not all(word.isdecimal() for word in words):
        problem = f"are {settings.devices!r}; write whole numbers with spaces between, such as 0 1"
        raise SettingsError("devices", problem)
    return tuple(int(word) for word in words)


def transfer_arguments(settings: VllmGroupSettings, mode: Mode) -> dict[str, object]:
    """Return the fields of vLLM's KVTransferConfig."""
    prefill = settings.role is Role.PREFILL
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer" if prefill else "kv_consumer",
        # A decode engine must never compute a prompt because a pull failed.
        "kv_load_failure_policy": "fail",
        # KV goes from cache to cache, past the host where they are on GPUs.
        "kv_buffer_device": "cuda" if mode.device is Device.GPU else "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": settings.lease_ttl_s},
    }


def engine_arguments(settings: VllmGroupSettings, mode: Mode) -> dict[str, object]:
    """Return vLLM's engine arguments by name, all but the KV transfer configuration."""
    arguments = dict(mode.vllm_args) | {
        "model": str(settings.model_path),
        "served_model_name": settings.served_model,
        # Pools take and give token ids; tokenizers are the router's.
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "data_parallel_size": settings.ranks,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_expert_parallel": settings.expert_parallel,
        "block_size": settings.block_size_tokens,
        "num_gpu_blocks_override": settings.blocks_override,
        "max_num_seqs": settings.seats_max,
        "max_model_len": settings.model_len_max_tokens,
        "max_num_batched_tokens": settings.batch_max_tokens,
        "enable_prefix_caching": settings.prefix_caching,
        "max_logprobs": LOGPROBS_MAX,
    }
    if mode.device is Device.CPU or settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(
            settings, read_shape(settings.model_path)
        )
    if mode.device is Device.GPU and settings.tensor_parallel == 1:
        # A rank is one process, which counts its steps, and ends with its own exit code.
        arguments["distributed_executor_backend"] = "uni"
    if settings.gpu_memory_share is not None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_share
    if settings.data_parallel_rpc_port is not None:
        arguments["data_parallel_rpc_port"] = settings.data_parallel_rpc_port
    if settings.role is Role.PREFILL:
        arguments["scheduling_policy"] = "priority"
    else:
        arguments["scheduler_cls"] = GUARD_ASYNC if mode.vllm_args["async_scheduling"] else GUARD
    if mode.has_grid:
        # A step has a token a seat. A larger one has no graph and was not warmed up: none fits.
        arguments["max_num_batched_tokens"] = settings.seats_max
    if mode.captures_graphs:
        compilation = mode.vllm_args["compilation_config"]
        assert isinstance(compilation, Mapping)
        arguments["compilation_config"] = dict(compilation) | {
            "cudagraph_capture_sizes": list(batch_grid(settings, mode))
        }
    return arguments


def environment(settings: VllmGroupSettings, mode: Mode) -> dict[str, str]:
    """Return the variables that engine processes are started with."""
    threads = str(settings.threads_per_rank)
    return (
        dict(mode.env)
        | ({} if mode.device is Device.CPU else _gpu_environment(settings))
        | {
            MODE: mode.name,
            "OMP_NUM_THREADS": threads,
            "VLLM_HOST_IP": settings.side_channel_host,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.side_channel_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(settings.side_channel_port),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
    )


NIXL_READS_BY_IPC = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""UCX reads another process's GPU memory by CUDA's IPC only where it sees NVLink, and else through
the host over TCP, which was seen in a virtual machine with one H200 (openucx/ucx pull 7566)."""


def _gpu_environment(settings: VllmGroupSettings) -> dict[str, str]:
    variables = {TUNED_FOLDER: str(TUNED), **NIXL_READS_BY_IPC}
    if numbers := device_numbers(settings):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, dict.fromkeys(numbers)))
    if shares_devices(settings):
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30 refuses it unless told.
    return variables


def shares_devices(settings: VllmGroupSettings) -> bool:
    """True if ranks of the group are on one device."""
    numbers = device_numbers(settings)
    return len(set(numbers)) < len(numbers)
