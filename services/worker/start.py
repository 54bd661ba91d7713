"""A group from its settings to its certification: engines first, since they are forked."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.certification import certify, foresee
from splitwave.core.worker import Certification, Role
from splitwave.engine.launch import check_settings, last_words, settings_kind, start_engine
from splitwave.engine.port import Engine, EngineDied
from splitwave.runtime.config import ConfigError
from splitwave.runtime.serve import Fatal
from splitwave.runtime.worker import WorkerConfig, make_group_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A group that runs, and may serve."""

    engine: Engine
    certification: Certification


def check_engine_settings(config: WorkerConfig, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that the engines do not have, or that cannot work.

    Before vLLM is imported for them, which takes seconds.
    """
    source, kind = sources.get("engine_settings", "default"), settings_kind(config.engine)
    try:
        check_settings(make_group_settings(config, Role(config.service), kind, source), os.environ)
    except ConfigError as error:
        raise ConfigError(f"engine_settings: {error}") from None
    except ValueError as error:
        raise ConfigError(f"engine_settings: {error} ({source})") from None


async def start_certified(config: WorkerConfig, role: Role) -> StartedGroup:
    """Start the engines of a worker and certify them.

    Raises ConfigError for settings that cannot work, Fatal if a process fails, and Uncertified if
    the group must not serve; then its engines are closed.
    """
    foresee(config)
    engine = await _start(config, role)
    try:
        return StartedGroup(engine, await certify(engine, config))
    except EngineDied as died:
        raise Fatal(last_words(died)) from died
    except BaseException:
        await engine.close()
        raise


async def _start(config: WorkerConfig, role: Role) -> Engine:
    log.info("starting engines", extra={"engine": config.engine})

    def say(rank: int, text: str) -> None:
        log.info("%s", text, extra={"rank": rank})

    try:
        engine = await start_engine(
            config.engine, lambda kind: make_group_settings(config, role, kind), say
        )
    except ValueError as error:
        raise ConfigError(f"engine_settings: {error}") from error
    except EngineDied as died:
        raise Fatal(last_words(died)) from died
    log.info("engines started", extra={"ranks": engine.description.ranks})
    return engine
