"""Start a group of either kind. vLLM's modules are imported only if vLLM is asked for."""

from collections.abc import Callable, Mapping

from splitwave.engine.port import Engine, EngineDied

Progress = Callable[[int, str], None]
"""Told what a rank is doing while it starts."""


def settings_kind(engine: str) -> type[object]:
    """The dataclass of a group's settings, of `vllm` or `sim` engines."""
    if engine == "sim":
        from splitwave.engine.sim import SimSettings

        return SimSettings
    from splitwave.engine.vllm.config import VllmGroupSettings

    return VllmGroupSettings


def check_settings(settings: object, environ: Mapping[str, str]) -> None:
    """Raise ValueError for settings that cannot work, as far as can be told with nothing started.

    Imports no vLLM. What depends on the model is told only if its files are there.
    """
    from splitwave.engine.vllm.config import VllmGroupSettings

    if not isinstance(settings, VllmGroupSettings):
        return  # Simulated groups' settings have checked themselves when they were made.
    from splitwave.core.mode import Device
    from splitwave.engine.vllm.check import check
    from splitwave.engine.vllm.numbers import check_memory, check_numbers

    check_numbers(settings)
    if not (settings.model_path / "config.json").is_file():
        return
    if check(settings, environ).device is Device.CPU:
        check_memory(settings)


async def start_engine(
    engine: str, make_settings: Callable[[type[object]], object], on_progress: Progress
) -> Engine:
    """Start a group of `vllm` or `sim` engines; every rank has stepped when this returns.

    `make_settings` fills in the settings dataclass that it is given. Raises ValueError for
    settings that cannot work and EngineDied if a process fails.
    """
    settings = make_settings(settings_kind(engine))
    if engine == "sim":
        from splitwave.engine.sim import SimSettings, start_sim_group

        assert isinstance(settings, SimSettings)
        return await start_sim_group(settings)
    from splitwave.engine.vllm.config import VllmGroupSettings
    from splitwave.engine.vllm.start import start_group

    assert isinstance(settings, VllmGroupSettings)
    return await start_group(settings, on_progress=on_progress)


def last_words(died: EngineDied) -> str:
    """What to say of a group that has ended: which rank, and the end of its log."""
    where = "the group" if died.rank is None else f"rank {died.rank}"
    return f"engine died ({where}): {died}\n{died.log_tail}".rstrip()
