"""How far each number of a group's settings reaches, told before anything is imported for it."""

import os
from collections.abc import Mapping

from splitwave.core.reach import COUNT_MAX, SECONDS_MAX, WIDE_MAX
from splitwave.engine.vllm.config import (
    SettingsError,
    VllmGroupSettings,
    kv_cache_bytes,
    read_shape,
)

SEATS_MAX = 2**16
"""More than a rank's batch was ever given; a grid has a size for each few of them."""

REACH: Mapping[str, tuple[float, float]] = {
    "epoch": (0, WIDE_MAX),
    "ranks": (1, SEATS_MAX),
    "tensor_parallel": (1, SEATS_MAX),
    "block_size_tokens": (1, SEATS_MAX),
    "kv_cache_bytes": (1, WIDE_MAX),
    "gpu_memory_share": (0, 1),
    "blocks_override": (1, COUNT_MAX),
    "seats_max": (1, SEATS_MAX),
    "model_len_max_tokens": (1, COUNT_MAX),
    "batch_max_tokens": (1, COUNT_MAX),
    "lease_ttl_s": (1, SECONDS_MAX),
    "side_channel_port": (1024, 65535),
    "data_parallel_rpc_port": (1, 65535),
    "threads_per_rank": (1, 1024),
    "seed": (0, 2**32 - 1),
    "start_timeout_s": (0.001, SECONDS_MAX),
    "close_grace_s": (0, SECONDS_MAX),
}
"""Least and most of each; what a model or another setting allows is asked in `check`."""


def check_numbers(settings: VllmGroupSettings) -> None:
    """Raise SettingsError for the first number that no group could have, with what it may be."""
    for name, (least, most) in REACH.items():
        value = getattr(settings, name)
        # NaN fails every comparison, so it is refused too.
        if value is not None and not least <= value <= most:
            raise SettingsError(name, f"is {value}; set it to {least} or more, {most:.0f} at most")


def check_memory(settings: VllmGroupSettings) -> None:
    """Raise SettingsError if the ranks' KV caches alone are more than the machine's memory.

    For CPU modes, on a model that is there.
    """
    each = kv_cache_bytes(settings, read_shape(settings.model_path))
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.ranks * each <= here:
        return
    if each <= here:
        cause = "ranks"
    else:
        cause = "seats_max" if settings.kv_cache_bytes is None else "kv_cache_bytes"
    raise SettingsError(
        cause,
        f"is {getattr(settings, cause)}; {settings.ranks} KV caches of {each / 2**20:.0f} MiB are "
        f"more than the {here / 2**20:.0f} MiB of this machine's memory: lower it",
    )
