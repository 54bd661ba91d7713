"""Which batch sizes a compiled CPU rank warms up before it serves."""

from types import SimpleNamespace

import pytest
from vllm.config import CompilationMode

from splitwave.engine.vllm import steps
from splitwave.engine.vllm.cpu import warm


def config(*, compiled: bool = True, kv_role: str | None = "kv_consumer") -> SimpleNamespace:
    mode = CompilationMode.DYNAMO_TRACE_ONCE if compiled else CompilationMode.NONE
    transfer = None if kv_role is None else SimpleNamespace(kv_role=kv_role)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode),
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(max_num_seqs=5),
    )


def test_a_compiled_decode_rank_warms_up_every_batch_that_its_seats_allow() -> None:
    assert list(warm.sizes_to_warm(config())) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "other", [config(compiled=False), config(kv_role=None), config(kv_role="kv_producer")]
)
def test_an_engine_that_is_eager_or_computes_prompts_has_no_such_sizes(
    other: SimpleNamespace,
) -> None:
    assert list(warm.sizes_to_warm(other)) == []


def test_the_sizes_run_after_vllms_own_warm_up_and_are_all_that_may_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[object] = []

    def vllms_own(_worker: object) -> str:
        ran.append("vllm's")
        return "times"

    monkeypatch.setattr(steps, "_counter", steps.StepCounter())
    worker = SimpleNamespace(
        vllm_config=config(),
        model_runner=SimpleNamespace(_dummy_run=lambda size, uniform_decode: ran.append(size)),
    )

    assert warm._then_each_size(vllms_own)(worker) == "times"  # noqa: SLF001  # what is installed
    assert ran == ["vllm's", 1, 2, 3, 4, 5]
    assert steps._counter.sizes == range(1, 6)  # noqa: SLF001  # what forwards are compared with
