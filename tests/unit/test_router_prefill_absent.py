"""What a prompt is told where prefill workers drain, are not ready, or are kept out."""

import asyncio
from dataclasses import replace

import pytest

from services.router.grants import POOL_WAIT_S
from services.router.prefill_client import LOOK_AGAIN_S
from splitwave.core.errors import Reason, ServingError
from splitwave.core.worker import WorkerLoad
from tests.fakes import now_s
from tests.unit.test_router_prefill_pool import Pool, description, play


@pytest.mark.parametrize(
    "load",
    [WorkerLoad(draining=True, ready=True), WorkerLoad(draining=False, ready=False)],
    ids=["draining", "not ready"],
)
def test_where_nobody_takes_new_work_it_is_said_soon_and_truly(load: WorkerLoad) -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 0, 0)
        pool.workers[0].loads.put_nowait((1, load))
        pool.workers[1].loads.put_nowait(None)
        pool.certified.kept_out["p2:1"] = "no certificate"
        await asyncio.sleep(0.01)
        began_s = now_s()
        with pytest.raises(ServingError) as refused:
            await pool.start()
        assert (refused.value.reason, now_s()) == (Reason.POOL_UNAVAILABLE, began_s + POOL_WAIT_S)
        assert refused.value.message == (
            "no prefill worker takes this request now:"
            " 1 draining or not ready, 1 kept out (no certificate), 1 not reachable"
        )
        assert pool.called() == [0, 0, 0]

    play(3, scenario)


def test_who_waits_for_full_queues_is_told_soon_once_their_workers_drain() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(390)
        asked = pool.start()
        await asyncio.sleep(10.0)
        await pool.report(390, draining=True)
        with pytest.raises(ServingError) as refused:
            await asked
        assert refused.value.reason is Reason.POOL_UNAVAILABLE
        assert 10.0 < now_s() < 10.0 + POOL_WAIT_S + 2 * LOOK_AGAIN_S

    play(1, scenario)


def test_a_worker_that_is_ready_again_in_time_takes_who_waits() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, draining=True)
        asked = pool.start()
        await asyncio.sleep(POOL_WAIT_S / 2)
        await pool.report(0)
        await asked
        assert pool.called() == [1]

    play(1, scenario)


def test_a_worker_that_drains_is_no_sign_that_its_layout_never_comes() -> None:
    """Another one of the other layout must not turn a short wait into "nobody has that layout"."""

    async def scenario(pool: Pool) -> None:
        pool.workers[1].description = replace(description("p1"), kv_layout="other")
        await pool.report(0, 0)
        pool.workers[0].loads.put_nowait((1, WorkerLoad(draining=True, ready=True)))
        await asyncio.sleep(0.01)
        began_s = now_s()
        with pytest.raises(ServingError) as refused:
            await pool.start(kv_layout="layout")
        assert (refused.value.reason, now_s()) == (Reason.POOL_UNAVAILABLE, began_s + POOL_WAIT_S)
        assert "1 draining or not ready, 1 not fit for it" in refused.value.message

    play(2, scenario)


def test_a_worker_that_drains_is_not_waited_for_where_the_others_have_refused() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 0)
        pool.workers[0].loads.put_nowait((1, WorkerLoad(draining=True, ready=True)))
        await asyncio.sleep(0.01)
        began_s = now_s()
        pool.workers[1].answers = [ServingError(Reason.OVERLOADED, "no", retry_after_s=9.0)]
        with pytest.raises(ServingError) as refused:
            await pool.start()
        assert (refused.value.retry_after_s, now_s()) == (9.0, began_s)

    play(2, scenario)
