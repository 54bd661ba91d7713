"""Whether a group's settings can work, before anything starts, and what vLLM made of them."""

from collections.abc import Mapping
from math import floor
from typing import Any  # vLLM's configuration is untyped here

from splitwave.core.mode import Device, Mode, StepKind, UnknownModeError, lookup
from splitwave.core.mode_rules import Combination, breaches
from splitwave.engine.vllm.combination import asked, made
from splitwave.engine.vllm.config import (
    DTYPE_BYTES,
    ModelShape,
    SettingsError,
    VllmGroupSettings,
    block_bytes,
    blocks_for,
    device_numbers,
    kv_cache_bytes,
    read_shape,
)

PORT_MIN, PORT_MAX = 1024, 65535
CPU_BLOCK_STEP_TOKENS = 32
"""vLLM's CPU attention is written for blocks of a multiple of this."""

FORBIDDEN_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "it overrides kv_cache_bytes",
    "VLLM_TARGET_DEVICE": "with it vLLM ignores Splitwave's platform plugin",
}
"""Variables that would silently undo a setting, and what each would do."""
FORBIDDEN_ENV_COMPILED = {
    "VLLM_CPU_CI_ENV": "with it vLLM compiles nothing and warms nothing up",
}
"""The same for modes whose steps are compiled."""


def check(settings: VllmGroupSettings, environ: Mapping[str, str]) -> Mode:
    """Return the mode of settings that can work on their model; SettingsError otherwise."""
    mode = _check_mode(settings)
    shape = read_shape(settings.model_path)
    _check_sizes(settings, shape)
    _refuse(mode, asked(settings, mode, environ))
    _check_parallel(settings, shape)
    _check_ports(settings)
    if mode.device is Device.CPU:
        _check_cpu(settings)
    else:
        _check_gpu(settings)
    compiled = StepKind.COMPILED in mode.step_kinds
    for name, harm in (FORBIDDEN_ENV | (FORBIDDEN_ENV_COMPILED if compiled else {})).items():
        if environ.get(name):
            raise SettingsError(name, f"is set in the environment; unset it: {harm}")
    return mode


def _check_mode(settings: VllmGroupSettings) -> Mode:
    """Check that the mode exists."""
    try:
        mode = lookup(settings.mode)
    except UnknownModeError as error:
        raise SettingsError("mode", str(error).removeprefix("mode: ")) from None
    return mode


def _check_sizes(settings: VllmGroupSettings, shape: ModelShape) -> None:
    """Check counts and lengths against each other and against the model."""
    for name in ("ranks", "tensor_parallel", "seats_max", "threads_per_rank", "lease_ttl_s",
                 "block_size_tokens", "model_len_max_tokens"):  # fmt: skip
        if getattr(settings, name) < 1:
            raise SettingsError(name, f"is {getattr(settings, name)}; must be at least 1")
    if settings.dtype not in DTYPE_BYTES:
        raise SettingsError("dtype", f"{settings.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if settings.model_len_max_tokens > shape.length_max_tokens:
        raise SettingsError(
            "model_len_max_tokens",
            f"is {settings.model_len_max_tokens}; the model ends at {shape.length_max_tokens}",
        )
    if settings.batch_max_tokens < settings.seats_max:
        raise SettingsError(
            "batch_max_tokens",
            f"is {settings.batch_max_tokens}; must be at least seats_max, {settings.seats_max}",
        )
    needed = blocks_for(settings.model_len_max_tokens, settings) + 1
    if settings.blocks_override is not None and settings.blocks_override < needed:
        raise SettingsError(
            "blocks_override",
            f"is {settings.blocks_override}; one request of model_len_max_tokens needs {needed}",
        )
    room = kv_cache_bytes(settings, shape) // block_bytes(settings, shape)
    if settings.blocks_override is None and room < needed:
        raise SettingsError(
            "kv_cache_bytes",
            f"holds {room} blocks; one request of model_len_max_tokens needs {needed}: "
            f"give {needed * block_bytes(settings, shape)} or more, or shorten the length",
        )


def _check_parallel(settings: VllmGroupSettings, shape: ModelShape) -> None:
    """Check that the model can be split as asked."""
    if shape.heads % settings.tensor_parallel:
        fits = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        raise SettingsError(
            "tensor_parallel",
            f"{settings.tensor_parallel} does not divide the model's {shape.heads} attention "
            f"heads; use one of {fits}, or scale with ranks",
        )
    if not settings.expert_parallel:
        return
    if shape.experts == 0:
        raise SettingsError("expert_parallel", "the model is dense; switch it off")
    if shape.experts % settings.ranks:
        raise SettingsError(
            "ranks", f"{settings.ranks} does not divide the model's {shape.experts} experts"
        )


def _check_ports(settings: VllmGroupSettings) -> None:
    """Check that all side channel ports are in range."""
    ports = settings.side_channel_ports
    if ports[0] < PORT_MIN or ports[-1] > PORT_MAX:
        raise SettingsError(
            "side_channel_port",
            f"ranks would listen on {ports[0]} to {ports[-1]}; "
            f"choose one so that all are within {PORT_MIN} to {PORT_MAX}",
        )


def _check_cpu(settings: VllmGroupSettings) -> None:
    """Check what only vLLM's CPU build asks for."""
    if settings.block_size_tokens % CPU_BLOCK_STEP_TOKENS:
        raise SettingsError(
            "block_size_tokens",
            f"is {settings.block_size_tokens}; on the CPU use a multiple of "
            f"{CPU_BLOCK_STEP_TOKENS}",
        )
    if settings.tensor_parallel > 1:
        raise SettingsError(
            "tensor_parallel", "CPU modes run one process a rank; use 1 and scale with ranks"
        )

    for name in ("devices", "gpu_memory_share"):
        if getattr(settings, name):
            raise SettingsError(name, f"is for GPUs; mode {settings.mode} runs on the CPU")


def _check_gpu(settings: VllmGroupSettings) -> None:
    """Check which devices a group takes, and how much of them."""
    numbers, needed = device_numbers(settings), settings.ranks * settings.tensor_parallel
    if numbers and len(numbers) != needed:
        raise SettingsError("devices", f"are {len(numbers)}; the group needs {needed}, one a rank")
    most = max(map(numbers.count, numbers), default=1)
    share, fair = settings.gpu_memory_share, floor(1000 / most) / 1000  # Never above its share.
    if share is None and most > 1:
        problem = f"says nothing, and {most} ranks are on one device; set {fair:g} at most"
        raise SettingsError("gpu_memory_share", problem)
    if share is not None and not 0.0 < share <= 1.0 / most:
        bound = f"{fair:g} at most" + (f", for {most} ranks a device" * (most > 1))
        raise SettingsError("gpu_memory_share", f"is {share:g}; set it above 0, and to {bound}")


def check_resolved(
    settings: VllmGroupSettings, mode: Mode, vllm_config: Any, environ: Mapping[str, str]
) -> None:
    """Raise SettingsError for the first rule that vLLM's resolved configuration breaks.

    Models, platforms and variables change arguments behind the settings. `environ`: after vLLM
    has resolved the configuration, since it sets variables itself.
    """
    _refuse(mode, made(settings.role, mode, vllm_config, environ))


def _refuse(mode: Mode, combination: Combination) -> None:
    if found := breaches(mode, combination):
        raise SettingsError(found[0].setting, str(found[0]))
