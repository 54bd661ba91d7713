"""What a router and its workers tell operators: /status.json, the page, /metrics of all three."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any  # JSON

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.operators_tables import METRICS
from services.router.status_page.view import Status
from splitwave.core.errors import Reason
from splitwave.core.worker import Role
from splitwave.runtime.metrics import Kind, render
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, eventually

SECRET = "the swans of Avon"
BODY: dict[str, Any] = {"model": MODEL, "prompt": SECRET, "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model, live_max=8) as started:
        yield started


async def complete(stack: RouterStack, request_id: str, **more: object) -> int:
    headers = {"X-Request-Id": request_id}
    async with stack.http.post("/v1/completions", json={**BODY, **more}, headers=headers) as answer:
        await answer.read()
        return answer.status


async def read_status(stack: RouterStack) -> tuple[Status, str]:
    async with stack.http.get("/status.json") as answer:
        text = await answer.text()
        assert answer.headers["Cache-Control"] == "no-store"
    return msgspec.json.decode(text, type=Status), text


async def scraped(stack: RouterStack) -> dict[str, str]:
    """What each service exports, as Prometheus sees it."""
    async with stack.http.get("/metrics") as answer:
        router = await answer.text()
    workers = {
        "prefill": render(await stack.workers.prefill_worker.collect()).decode(),
        "decode": render(await stack.workers.decode_worker.collect()).decode(),
    }
    return {"router": router, **workers}


async def test_each_exported_metric_is_declared_and_each_declared_one_is_exported(
    stack: RouterStack,
) -> None:
    assert await complete(stack, "r1") == 200

    for service, text in (await scraped(stack)).items():
        exported = {
            (family.name, family.type): set().union(*(s.labels for s in family.samples)) - {"le"}
            for family in text_string_to_metric_families(text)
        }
        who = ["process", service, *(["engine", "group", "waves"] if service != "router" else [])]
        declared = {
            (family.name, family.kind.value): set(family.labels)
            for name in who
            for family in METRICS[name]
        }
        assert exported.keys() == declared.keys()
        for key, labels in exported.items():
            assert labels in (declared[key], set()), key


def value(text: str, name: str, **labels: str) -> float:
    """The sum over samples of that name with those labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_what_was_served_is_counted_once_on_every_side(stack: RouterStack) -> None:
    for number in range(3):
        assert await complete(stack, f"r{number}", ignore_eos=True) == 200

    # Engines' counts may be a second old, and were asked for at the first scrape.
    await stack.workers.decode_worker.counters.refresh()
    texts = await scraped(stack)
    router, prefill, decode = texts["router"], texts["prefill"], texts["decode"]
    tokens = 3 * 20
    assert value(router, "splitwave_router_requests_admitted_total") == 3
    assert value(router, "splitwave_router_requests_total") == 3
    assert value(router, "splitwave_router_requests_total", outcome="finished") == 3
    assert value(router, "splitwave_router_completion_tokens_total") == tokens
    assert value(router, "splitwave_router_prompt_tokens_total") == 3 * len(SECRET)
    assert value(router, "splitwave_router_ttft_seconds_count") == 3
    gaps = value(router, "splitwave_router_itl_seconds_count")
    assert tokens / 2 < gaps <= tokens - 3  # Tokens that came together had one gap.
    assert value(prefill, "splitwave_prefill_answers_total") == 3
    assert value(prefill, "splitwave_prefill_leases_ended_total", end="pulled") == 3
    assert value(prefill, "splitwave_prefill_compute_seconds_count") == 3
    assert value(decode, "splitwave_decode_tokens_total") == tokens - 3  # Three came from prefill.
    assert value(decode, "splitwave_decode_fences_total", answer="confirmed") == 3
    assert value(decode, "splitwave_decode_attempts_ended_total", end="length") == 3
    assert value(decode, "splitwave_decode_seats_held") == 0
    assert value(decode, "splitwave_engine_prompt_tokens_total", role="decode") == 0


async def test_a_refused_request_is_shed_and_not_admitted(stack: RouterStack) -> None:
    stack.door.admission.closed = True

    assert await complete(stack, "r1") == 503

    text = (await scraped(stack))["router"]
    assert value(text, "splitwave_router_requests_admitted_total") == 0
    shed = value(text, "splitwave_router_requests_shed_total", reason=Reason.WORKER_DRAINING.value)
    assert shed == 1
    status, _ = await read_status(stack)
    assert status.router is not None
    assert status.router.refused == {Reason.WORKER_DRAINING.value: 1}


async def test_the_status_tells_of_pools_ranks_and_requests_and_never_of_text(
    stack: RouterStack,
) -> None:
    assert await complete(stack, "r1") == 200

    status, text = await read_status(stack)

    assert SECRET not in text
    assert status.router is not None
    assert (status.router.state, status.router.live_max) == ("serving", 8)
    assert status.router.outcomes == {"finished": 1}
    assert status.router.refused == {}
    (prefill,), (decode,) = status.pool(Role.PREFILL), status.pool(Role.DECODE)
    assert (prefill.state, decode.state) == ("serving", "serving")
    assert [rank.seats_max for rank in decode.ranks] == [DECODE.seats_per_rank] * DECODE.ranks
    assert sum(rank.steps_by_kind.get("eager", 0) for rank in prefill.ranks) > 0
    assert prefill.leases.pulled == 1
    (request,) = status.requests
    assert (request.request_id, request.outcome, request.attempts) == ("r1", "finished", 1)
    assert request.prompt_tokens == len(SECRET)
    assert request.first_token_s is not None
    assert request.handoff_bytes > 0
    parts = request.grant_wait_s + request.prefill_s + request.handoff_s + request.decode_s
    assert parts == pytest.approx(request.total_s)


async def test_a_live_request_and_the_seat_that_it_holds_are_seen(model: Model) -> None:
    async with router_stack(model, decode=replace(DECODE, step_fixed_s=0.02)) as stack:
        running = asyncio.create_task(complete(stack, "long", max_tokens=200, ignore_eos=True))
        await eventually(lambda: sum(stack.workers.decode_worker.room.table.seats_held) == 1)
        await eventually(lambda: stack.door.history.completion_tokens > 1)
        status, _ = await read_status(stack)
        (request,) = status.requests
        (decode,) = status.pool(Role.DECODE)
        assert (request.request_id, request.outcome) == ("long", "")
        assert 0 < request.completion_tokens < 200
        assert sum(rank.seats_held for rank in decode.ranks) == 1
        assert status.router is not None
        assert status.router.live == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await stack.empty()


async def test_a_worker_that_drains_is_shown_so_at_once(stack: RouterStack) -> None:
    await read_status(stack)
    stack.workers.prefill_worker.refuse()
    await eventually(lambda: not stack.door.ready())

    status, _ = await read_status(stack)

    (prefill,) = status.pool(Role.PREFILL)
    assert prefill.state == "draining"


async def test_a_decode_worker_that_drains_is_not_shown_as_one_that_went_away(
    stack: RouterStack,
) -> None:
    await read_status(stack)
    (peer,) = stack.door.fleet.decode_peers()
    stack.workers.decode_worker.refuse()
    for connected in (True, False):  # It closes its sessions once they are idle, and takes none.
        await eventually(lambda: peer.session.connected is connected and peer.draining)  # noqa: B023  # awaited here

        status, _ = await read_status(stack)

        (decode,) = status.pool(Role.DECODE)
        assert decode.state == "draining"


async def test_a_worker_that_went_away_is_shown_as_it_last_was(stack: RouterStack) -> None:
    await read_status(stack)
    stack.workers.decode.stop.set()
    (peer,) = stack.door.fleet.decode_peers()
    await eventually(lambda: not peer.session.connected and not peer.draining)

    status, _ = await read_status(stack)

    (decode,) = status.pool(Role.DECODE)
    assert decode.state == "unreachable"
    assert decode.mode == "decode_cpu_eager"
    assert status.router is not None
    assert status.router.state == "unreachable"


async def test_nobody_waits_long_for_an_engine_that_stands_still(model: Model) -> None:
    async with router_stack(model, decode=DECODE) as stack:
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        async def never() -> tuple[()]:
            asked.set()
            await asyncio.sleep(60.0)
            return ()

        stack.workers.decode_worker.counters._ask_engine = never  # noqa: SLF001  # stands still
        began_s = loop.time()
        texts = await scraped(stack)
        assert asked.is_set()
        assert loop.time() - began_s < 10.0
        assert value(texts["decode"], "splitwave_engine_counters_age_seconds") > 0


async def test_the_page_may_load_nothing_and_run_nothing_but_itself(stack: RouterStack) -> None:
    async with stack.http.get("/") as answer:
        page = await answer.text()

    policy = answer.headers["Content-Security-Policy"]
    assert answer.content_type == "text/html"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.count("<script>") == page.count("<style>") == 1
    assert "innerHTML" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_each_kind_of_metric_is_used() -> None:
    kinds = {family.kind for families in METRICS.values() for family in families}

    assert kinds == set(Kind)
