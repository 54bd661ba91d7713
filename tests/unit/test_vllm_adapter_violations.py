"""The adapter passes a rank's record of a step outside the mode on, as no request's output."""

import asyncio
from types import SimpleNamespace

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from splitwave.core.mode_guard import StepViolation
from splitwave.engine.port import GroupDescription, Role
from splitwave.engine.vllm.adapter import VllmEngine
from splitwave.engine.vllm.violations import VIOLATION

DESCRIPTION = GroupDescription(
    group_id="g", epoch=1, role=Role.DECODE, mode="decode_cpu_compiled", model="m", ranks=2,
    block_size_tokens=32, blocks_per_rank=64, seats_per_rank=4, model_len_max_tokens=128,
    batch_max_tokens=4, block_bytes=1, kv_layout="k",
)  # fmt: skip


def engine() -> VllmEngine:
    """A group whose engine cores are a queue that the test fills."""
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 260))
    client = SimpleNamespace(
        vllm_config=config, outputs_queue=asyncio.Queue(), resources=SimpleNamespace()
    )
    processes = SimpleNamespace(
        died=asyncio.get_running_loop().create_future(), coordinator=None, pids=list
    )
    return VllmEngine(client=client, processes=processes, description=DESCRIPTION)  # type: ignore[arg-type]  # stand-ins


async def test_a_violation_comes_with_a_step_of_its_rank_and_once() -> None:
    made = engine()
    record = {"step": 7, "kind": "eager", "tokens": 1, "requests": []}
    told = EngineCoreOutput(
        request_id="splitwave/violation", new_token_ids=[], kv_transfer_params={VIOLATION: record}
    )
    queue = made._client.outputs_queue  # noqa: SLF001  # what engine cores fill
    queue.put_nowait(EngineCoreOutputs(engine_index=1, outputs=[told], timestamp=3.0))
    queue.put_nowait(EngineCoreOutputs(engine_index=0, outputs=[], timestamp=4.0))

    (step,) = await anext(made.steps())
    assert (step.rank, step.outputs, step.at_s) == (1, [], 3.0)
    assert list(step.violations) == [StepViolation(rank=1, step=7, kind="eager", tokens=1)]
