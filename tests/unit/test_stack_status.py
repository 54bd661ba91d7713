"""What a local stack hears of its workers on the zygote's pipe."""

import asyncio
import os
from typing import cast

from services.cli.plan import Plan
from services.cli.stack import Stack


async def test_the_end_of_the_zygote_is_heard_once_and_not_for_ever() -> None:
    heard: list[int] = []

    class Listening(Stack):
        def _read_status(self) -> None:
            heard.append(1)
            super()._read_status()

    stack = Listening(cast("Plan", None), lambda who, what: None)
    theirs = stack.listen()
    os.close(theirs)
    for _ in range(100):
        await asyncio.sleep(0)
    await stack.stop()

    assert len(heard) == 1, "the loop would spin until the stack has stopped"
