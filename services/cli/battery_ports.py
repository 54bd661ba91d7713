"""Ports for a battery's engines and stacks: each of several at once has others."""

import contextlib
import socket
from collections.abc import Callable

from services.cli.plan import Plan
from services.cli.stack import StackFailed, check_ports

FIRST_PORTS = range(8190, 8990, 100)
"""Each the first of a battery's ports; `splitwave up` has those from 8080."""
CLAIM = 9
"""Which port from there a command holds from its first moment: the others are taken later, and
between two boots of the engines nobody has them."""


def free_plan(plan_from: Callable[[int], Plan], claims: contextlib.ExitStack) -> Plan:
    """The first of the plans whose ports nobody has or has claimed; `claims` holds them.

    Raises ValueError if there are none left.
    """
    for first in FIRST_PORTS:
        plan = plan_from(first)
        try:
            with contextlib.ExitStack() as claim:
                claim.enter_context(socket.socket()).bind(("127.0.0.1", first + CLAIM))
                check_ports(plan)
                claims.enter_context(claim.pop_all())
        except (OSError, StackFailed):
            continue
        return plan
    tried = ", ".join(map(str, FIRST_PORTS))
    raise ValueError(f"ports: behind each of {tried} there is one that is taken; free some")
