"""The routes: the page, its data, and metrics on the port that clients use."""

import asyncio
import base64
import hashlib
import importlib.resources
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import version

import msgspec
from aiohttp import web

from services.router import metrics
from services.router.front_door import FrontDoor
from services.router.peer import DecodePeer
from services.router.prefill_client import PrefillPeer
from services.router.status_page.descriptions import Descriptions, GrpcWorkers
from services.router.status_page.view import (
    DRAINING,
    SERVING,
    UNREACHABLE,
    GroupView,
    RouterView,
    Status,
    group_view,
)
from splitwave.core.worker import Role
from splitwave.runtime.metrics import scrape

_encode = msgspec.json.encode
_VERSION = version("splitwave")  # Read here: it is a file, and the loop must not wait for files.

PAGE = importlib.resources.files(__package__).joinpath("page.html").read_bytes()


def _inline(tag: str) -> str:
    """The source of the page's one script or style, as a content security policy names it."""
    match = re.search(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), PAGE, re.DOTALL)
    assert match is not None
    digest = base64.b64encode(hashlib.sha256(match[1]).digest())
    return f"'sha256-{digest.decode()}'"


PAGE_HEADERS = {
    # Request ids are the clients' words: even one that the page took for markup could do nothing.
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_inline('script')}; style-src {_inline('style')};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class StatusPage:
    """One router seen from outside. Nothing is asked of the workers while nobody looks."""

    def __init__(self, door: FrontDoor, descriptions: Descriptions) -> None:
        self._door = door
        self._descriptions = descriptions
        self._began_s = asyncio.get_running_loop().time()

    async def page(self, _: web.Request) -> web.Response:
        """GET /."""
        return web.Response(
            body=PAGE, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS
        )

    async def data(self, _: web.Request) -> web.Response:
        """GET /status.json."""
        return web.Response(
            body=_encode(await self.status()),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics."""
        return await scrape(lambda: metrics.collect(self._door))

    async def status(self) -> Status:
        """Everything now."""
        fleet = self._door.fleet
        prefill, decode = fleet.prefill_peers(), fleet.decode_peers()
        addresses = [*(peer.address for peer in prefill), *(peer.address for peer in decode)]
        await self._descriptions.refresh(addresses)
        groups = [
            *(self._group(Role.PREFILL, x.address, _prefill_state(x)) for x in prefill),
            *(self._group(Role.DECODE, x.address, _decode_state(x)) for x in decode),
        ]
        return Status(router=self._router(), groups=groups, requests=self._door.history.recent())

    def _group(self, role: Role, address: str, state: str) -> GroupView:
        told = self._descriptions.get(address)
        refused = self._door.fleet.stands.why_not(address)
        if told is None:
            return GroupView(role=role, address=address, state=state, refused=refused)
        age_s = asyncio.get_running_loop().time() - told.at_s
        return replace(
            group_view(address, told.description, state=state, age_s=age_s), refused=refused
        )

    def _router(self) -> RouterView:
        door, history = self._door, self._door.history
        state = SERVING if door.ready() else UNREACHABLE
        return RouterView(
            router_id=door.settings.router_id,
            version=_VERSION,
            model=door.settings.model,
            state=DRAINING if door.admission.closed else state,
            uptime_s=asyncio.get_running_loop().time() - self._began_s,
            live=door.admission.live,
            live_max=door.admission.live_max,
            rooms_waiting=door.fleet.rooms.waiting,
            prompts_waiting=door.fleet.prefill_pool.waiting,
            admitted=door.admitted,
            outcomes=dict(door.outcomes),
            shed={reason.value: n for reason, n in door.admission.refused.items()},
            resumes={reason.value: n for reason, n in history.resumes.items()},
            prompt_tokens=history.prompt_tokens,
            completion_tokens=history.completion_tokens,
            handoff_bytes=history.handoff_bytes,
            refused=door.refusals.by_reason(),
        )


def _prefill_state(peer: PrefillPeer) -> str:
    """As this router sees it: what the worker said of itself may be older."""
    if peer.queue is None:
        return UNREACHABLE
    return DRAINING if peer.queue.draining else SERVING


def _decode_state(peer: DecodePeer) -> str:
    if peer.draining:  # It takes no session then, so it need not be connected.
        return DRAINING
    return SERVING if peer.session.connected else UNREACHABLE


def add_routes(app: web.Application, door: FrontDoor) -> None:
    """Add /, /status.json and /metrics; what they opened is closed with the application."""
    workers = GrpcWorkers()
    descriptions = Descriptions(workers.describe)
    page = StatusPage(door, descriptions)

    async def close(_: web.Application) -> AsyncIterator[None]:
        yield
        await descriptions.close()
        await workers.close()

    app.router.add_get("/", page.page)
    app.router.add_get("/status.json", page.data)
    app.router.add_get("/metrics", page.metrics)
    app.cleanup_ctx.append(close)
