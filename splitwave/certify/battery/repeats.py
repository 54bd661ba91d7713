"""The same large request again and again: the n-th must cost what the second did."""

import time

from splitwave.certify.battery import statistics
from splitwave.certify.battery.bench import Bench, Subject
from splitwave.certify.battery.cases import prompt
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.soak import costs
from splitwave.certify.battery.statistics import StepSample, TooFewSamples
from splitwave.certify.battery.verdict import Observed, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.generation import Sampling
from splitwave.core.mode import Device
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest
from splitwave.engine.vllm.probe.breaks import Break

GROUP_MAX = 7
"""Requests that are compared: from the second on, and so many up to the last. The first pays for
connections and caches; one request alone would be compared with its own noise."""
SAMPLES_MIN = 4
"""Steps of one size that both must have; a prompt that fits into one step has one."""


class RepeatedLarge:
    """The twentieth large request is no slower than the second, within the interval."""

    name = CheckName.REPEATED_LARGE
    broken = "from the middle on steps take twice their time on the rank that runs them"
    shows = ("slower",)

    async def observe(self, bench: Bench) -> Observed:
        """One request after the other; the cost is that of the steps of the rank that ran it."""
        return await self._repeat(bench, bench.scale.repeats, None)

    async def observe_broken(self, bench: Bench) -> Observed:
        """Fewer of them, the second half with slow steps."""
        return await self._repeat(
            bench, bench.scale.repeat_control, bench.scale.repeat_control // 2
        )

    async def _repeat(self, bench: Bench, count: int, slow_from: int | None) -> Observed:
        rank = bench.rig.ranks()[-1]
        requests = []
        try:
            for number in range(count):
                if number == slow_from:
                    await bench.rig.target.probe.start_break(Break.SLOW, rank)
                requests.append(await self._steps(bench, rank))
        finally:
            await bench.rig.target.probe.end_break(Break.SLOW, rank)
        return {"requests": requests, "prompt_tokens": len(self._prompt(bench))}

    def _prompt(self, bench: Bench) -> tuple[int, ...]:
        envelope, scale = bench.subject.envelope, bench.scale
        room = envelope.sequence_max_tokens - scale.repeat_tokens
        return prompt(min(scale.repeat_prompt_tokens, envelope.prompt_max_tokens, room), 1)

    async def _steps(self, bench: Bench, rank: int) -> list[tuple[int, float]]:
        """Tokens and cost of the request's steps on the rank under test."""
        rig, target = bench.rig, bench.rig.target
        mark, began_s = await target.last_step(rank), time.monotonic()
        if rig.role is Role.PREFILL:
            sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
            name = rig.name("large")
            request = EngineRequest(
                engine_request_id=name,
                rank=rank,
                token_ids=self._prompt(bench),
                sampling=sampling,
            )
            await rig.prefill.run(request)
        else:
            tokens = bench.scale.repeat_tokens
            sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            opened = await rig.open(self._prompt(bench), sampling, rank)
            await rig.finished(opened)
        device = bench.subject.mode.device
        if device is Device.GPU and rig.role is Role.PREFILL:
            # One step, whose time is not its worker's: the request's is the nearest.
            return [(len(self._prompt(bench)), time.monotonic() - began_s)]
        return costs(await target.probe.steps(rank, mark), device)

    def judge(self, seen: Observed, subject: Subject, scale: Scale) -> Verdict:
        """The interval's upper end below the drift's bound."""
        verdict = Verdict()
        requests = [[StepSample(*row) for row in rows] for rows in seen["requests"]]
        size = min(GROUP_MAX, (len(requests) - 1) // 2)
        early = [step for request in requests[1 : 1 + size] for step in request]
        late = [step for request in requests[-size:] for step in request]
        verdict.note(requests=len(requests), prompt_tokens=seen["prompt_tokens"])
        try:
            found = statistics.at_equal_size(early, late, samples_min=SAMPLES_MIN)
        except TooFewSamples as few:
            verdict.require(False, "few", str(few))
            return verdict
        verdict.note(
            second_s=round(sum(step.cpu_s for step in requests[1]), 4),
            last_s=round(sum(step.cpu_s for step in requests[-1]), 4),
            ratio=round(found.value, 4),
            ratio_low=round(found.low, 4),
            ratio_high=round(found.high, 4),
            ratio_max=scale.drift_max,
        )
        words = f"steps of the last requests cost {found.value:.2f} times what early ones did"
        verdict.require(found.high < scale.drift_max, "slower", words)
        return verdict
