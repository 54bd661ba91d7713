"""A rank's report as it travels on vLLM's own socket from an engine to the coordinator.

It is the result of a utility call that nobody made: vLLM's messages have no other place for it.
Its own coordinator refuses such a message, so engines report to Splitwave's alone
(`switches.wave_epoch`).
"""

from typing import Any  # vLLM's messages are untyped here

from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
from vllm.v1.serial_utils import UtilityResult

from splitwave.core.wave_message import RankReport, RankWork

CALL_ID = -77
"""Marks a report. Calls of vLLM's clients have positive ids, its own notices -1."""


def report_to_outputs(report: RankReport) -> Any:
    """Wrap a report in vLLM's EngineCoreOutputs. The rank travels as their `engine_index`."""
    work = report.work
    fields = [*report[1:-1], None if work is None else _work_to_list(work)]
    return EngineCoreOutputs(
        utility_output=UtilityOutput(CALL_ID, result=UtilityResult(fields)),
    )


def report_from_outputs(outputs: Any) -> RankReport | None:
    """Return the report in a decoded message of an engine, or None if it is another message."""
    utility = outputs.utility_output
    if utility is None or utility.call_id != CALL_ID:
        return None
    *fields, work = utility.result.result
    rank = outputs.engine_index
    return RankReport._make([rank, *fields, None if work is None else _work(work)])


def _work_to_list(work: RankWork) -> list[object]:
    return [
        dict(work.steps_by_kind),
        work.dummy_steps,
        work.votes,
        work.tokens,
        work.padded_tokens,
        dict(work.steps_by_size),
    ]


def _work(fields: list[Any]) -> RankWork:
    steps_by_kind, dummy_steps, votes, tokens, padded_tokens, steps_by_size = fields
    return RankWork(
        steps_by_kind=steps_by_kind,
        steps_by_size=steps_by_size,
        dummy_steps=dummy_steps,
        votes=votes,
        tokens=tokens,
        padded_tokens=padded_tokens,
    )
