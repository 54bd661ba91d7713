"""Entry points that vLLM calls in each of its processes: front, engine core and workers.

Nothing is imported from vLLM until they are called: vLLM asks for the platform while it is
itself being imported.
"""

import contextlib

CPU_PLATFORM = "splitwave.engine.vllm.cpu.platform.SplitwaveCpuPlatform"

_wrapped_for: tuple[str | None, bool] | None = None
"""What the environment asked for when this process, or one that it was forked from, wrapped vLLM
for GPUs."""


def platform() -> str | None:
    """Our CPU platform's class path, or None where vLLM would not choose its plain CPU platform.

    So a GPU installation is left alone, and so are CPU platforms that are special in other ways.
    """
    from vllm.platforms import builtin_platform_plugins

    chosen: dict[str, str] = {}
    for name, detect in builtin_platform_plugins.items():
        with contextlib.suppress(Exception):  # as vLLM: what cannot be detected is not here
            if path := detect():
                chosen[name] = path
    return CPU_PLATFORM if chosen == {"cpu": "vllm.platforms.cpu.CpuPlatform"} else None


def register() -> None:
    """Wrap vLLM where this process needs it. Idempotent; raises SeamBroken if it does not fit."""
    from vllm.platforms import current_platform

    from splitwave.engine.vllm import (
        core_calls,
        long_steps,
        misrouting,
        progress,
        seams,
        stacks,
        steps,
        switches,
        violations,
        waves,
    )
    from splitwave.engine.vllm.probe import calls as probe

    is_cpu = current_platform.is_cpu()
    seams.check_seams(seams.EVERYWHERE + (seams.CPU if is_cpu else seams.GPU))
    stacks.answer()  # Where engines are spawned, nothing else of ours runs in them before.
    core_calls.install()
    steps.install()
    progress.install()
    waves.install()
    violations.install()
    probe.install()
    if switches.fault(switches.Fault.SHIFT_ROUTING):
        misrouting.install()
    if switches.fault(switches.Fault.LONG_STEPS):
        long_steps.install()
    if is_cpu:
        from splitwave.engine.vllm.cpu import moe, padding, warm

        moe.install()
        padding.install()
        warm.install()
    else:
        _register_for_gpus()


def _register_for_gpus() -> None:
    from splitwave.engine.vllm import jit_caches, seams, switches

    global _wrapped_for
    _wrapped_for = _wrapped_for or _asked()
    jit_caches.separate()
    if transport := switches.worst_token_transport():
        from splitwave.engine.vllm.worst_token import fit, install

        seams.check_seams(fit.SEAMS)
        install.install(transport)
    elif switches.handovers_wanted():
        from splitwave.engine.vllm.worst_token import fit, handover

        seams.check_seams(fit.MICROBATCHES)
        handover.install()


def fits() -> bool:
    """False if this process has wrapped vLLM for another group than its environment asks for now.

    vLLM calls `register` once a process, and a fork is not called again: an engine of a second
    group that was forked from here would run the first one's dispatch.
    """
    return _wrapped_for is None or _wrapped_for == _asked()


def _asked() -> tuple[str | None, bool]:
    from splitwave.engine.vllm import switches

    return switches.worst_token_transport(), switches.handovers_wanted()
