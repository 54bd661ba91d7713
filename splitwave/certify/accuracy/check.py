"""The accuracy check: a task scored through the gateway, item by item beside the aggregated run."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # JSON

from splitwave.certify.accuracy import gateway, lm_eval, task
from splitwave.certify.accuracy.gateway import Command
from splitwave.certify.accuracy.lm_eval import Sample
from splitwave.certify.accuracy.task import Task
from splitwave.certify.battery.bench import Subject
from splitwave.certify.battery.run import Result, Work, result_of
from splitwave.certify.battery.scale import Scale
from splitwave.certify.battery.verdict import CheckBroken, Observed, Problem, Verdict
from splitwave.core.evidence import Check as CheckName
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.generation import Sampling
from splitwave.engine.vllm.aggregated import AggregatedFailed, PlainSettings, Question, answer
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.switches import FAULTS, Fault
from splitwave.text.completion import TextOptions, TextStream
from splitwave.text.tokenizer import Tokenizer

CONTROL_ITEMS = 24
TELLING = (0.3, 0.8)
"""Between these scores of the aggregated run an item that comes out otherwise is likely to show in
the score too. Beyond them agreement still counts; the figures say so."""

TOLD_MAX = 4

Say = Callable[[str], None]
Score = Callable[[Path, Command, Task, Path], Awaitable[list[Sample]]]
"""Asks a running stack a task's items: `lm_eval.score`, or in tests what needs no harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The stacks that the check needs, and the harness."""

    main: Command
    control: Command
    """The same on a model whose experts differ: there a wrong expert shows."""
    lm_eval_python: Path
    gsm8k: Path | None = None
    """Where the data set GSM8K would lie."""


def judge(seen: Observed, scale: Scale) -> Verdict:
    """Hold item-by-item agreement against the bound. Pure."""
    verdict = Verdict()
    rows = seen["items"]
    same = sum(row["ours"] == row["theirs"] for row in rows)
    agreement = same / len(rows) if rows else 0.0
    score = sum(row["right"] for row in rows) / max(1, len(rows))
    aggregated = sum(row["theirs"] == row["answer"] for row in rows) / max(1, len(rows))
    verdict.note(
        items=len(rows),
        agreement=round(agreement, 4),
        agreement_min=scale.agreement_min,
        score=round(score, 4),
        score_of_the_aggregated_run=round(aggregated, 4),
        score_is_telling=TELLING[0] <= aggregated <= TELLING[1],
    )
    few = min(task.ITEMS_MIN, seen["items_asked"])
    scored = len(rows) >= max(1, few)
    verdict.require(scored, "few", f"{len(rows)} of {few} items were scored")
    words = f"{len(rows) - same} of {len(rows)} answers differ from the aggregated run's"
    # No answers are no disagreement: a control that got none has not been noticed.
    verdict.require(not rows or agreement >= scale.agreement_min, "agreement", words)
    differ = seen.get("other_engines", [])
    words = f"the stack behind the gateway runs otherwise: {'; '.join(differ[:TOLD_MAX])}"
    verdict.require(not differ, "other_engines", words)
    if problems := seen.get("gsm8k"):
        _judge_gsm8k(verdict, problems["items"], scale)
    return verdict


def judge_control(broken: Observed, right: Observed, scale: Scale) -> Verdict:
    """Hold the shifted run against the bound; `right`: the same run without the shift. Pure.

    Where that fails too, nobody knows what the shift did, so the control shows nothing.
    """
    verdict, unshifted = judge(broken, scale), judge(right, scale)
    verdict.note(
        agreement_unshifted=unshifted.figures["agreement"], items_unshifted=len(right["items"])
    )
    if not unshifted.passed:
        words = f"without the shift it fails as well: {unshifted.said()}"
        verdict.problems[:] = [Problem("unshifted", words)]
    return verdict


def _judge_gsm8k(verdict: Verdict, rows: Sequence[Mapping[str, Any]], scale: Scale) -> None:
    agreement = sum(row["ours"] == row["theirs"] for row in rows) / max(1, len(rows))
    verdict.note(
        gsm8k_items=len(rows),
        gsm8k_agreement=round(agreement, 4),
        gsm8k_score=round(sum(row["right"] for row in rows) / max(1, len(rows)), 4),
    )
    words = f"only {agreement:.1%} of GSM8K's answers agree with the aggregated run's"
    verdict.require(agreement >= scale.agreement_min, "gsm8k", words)


@dataclass(slots=True, kw_only=True)
class AccuracyCheck:
    """Scores the task once, for every subject of the battery that asks."""

    settings: VllmGroupSettings
    gateway: Gateway
    directory: Path
    environment: Mapping[str, str]
    """The stacks' variables."""
    score: Score = lm_eval.score
    name: CheckName = CheckName.ACCURACY
    broken: str = "each token goes to the expert after the one that its router chose"
    shows: Sequence[str] = ("agreement",)
    _done: dict[Scale, tuple[Observed, Verdict, Work]] = field(default_factory=dict)
    """By scale: what the run saw, the verdict on its control, and the work."""
    _ran: dict[str, Fingerprint] = field(default_factory=dict)
    """By role what the stack's engines were."""

    async def __call__(
        self, subject: Subject, fingerprint: Fingerprint, scale: Scale, say: Say
    ) -> Result:
        """Run it, or give what it found before. Raises CheckBroken if it cannot be run."""
        if scale not in self._done:
            self._done[scale] = await self._all(scale, say)
        seen, control, work = self._done[scale]
        ran = self._ran.get(subject.mode.role)
        differ = fingerprint.differences(ran) if ran else ["it did not say what it runs"]
        seen = seen | {"other_engines": [str(difference) for difference in differ]}
        return result_of(self, judge(seen, scale), control, work, seen)

    async def _all(self, scale: Scale, say: Say) -> tuple[Observed, Verdict, Work]:
        began_s = time.monotonic()
        asked = task.few_shot(scale.accuracy_items, scale.seed)
        problems = self.gateway.gsm8k and task.gsm8k(self.gateway.gsm8k, scale.gsm8k_items)
        tasks = [asked, problems] if problems else [asked]
        try:
            (rows,), steps = await self._compare(self.gateway.main, tasks, [{}], say)
            seen, *more = rows
            few = asked.first(CONTROL_ITEMS)
            right, broken = await self._control(seen, few, say)
        except (AggregatedFailed, gateway.GatewayFailed, lm_eval.HarnessFailed, OSError) as error:
            raise CheckBroken(f"accuracy: {error}") from error
        if more:
            seen["gsm8k"] = more[0]
        control = judge_control(broken, right, scale)
        return seen, control, Work(time.monotonic() - began_s, steps)

    async def _control(self, seen: Observed, few: Task, say: Say) -> tuple[Observed, Observed]:
        """What came of a few items without the shift, and with it and nothing else changed."""
        shifted = {FAULTS: Fault.SHIFT_ROUTING.value}
        command = self.gateway.control
        if command.model_path == self.gateway.main.model_path:  # It has run without the shift.
            ((broken,),), _ = await self._compare(command, [few], [shifted], say)
            return seen, broken
        ((right,), (broken,)), _ = await self._compare(command, [few], [{}, shifted], say)
        return right, broken

    async def _compare(
        self,
        command: Command,
        tasks: Sequence[Task],
        environments: Sequence[Mapping[str, str]],
        say: Say,
    ) -> tuple[list[list[Observed]], int]:
        """Both runs of some tasks, in stacks with each of these variables, and the steps taken."""
        model = Path(command.model_path).name
        kinds = [", ".join(environment.values()) or "right" for environment in environments]
        names = ", ".join(f"{len(asked.items)} items of {asked.name}" for asked in tasks)
        say(f"accuracy: {names} on {model}, aggregated and through the gateway: {'; '.join(kinds)}")

        async def through() -> tuple[list[list[list[Sample]]], int]:
            found, steps = [], 0
            for environment, kind in zip(environments, kinds, strict=True):
                directory = self.directory / model / kind
                samples, more = await self._through(command, environment, tasks, directory)
                found.append(samples)
                steps += more
            return found, steps

        # Side by side: either leaves cores idle while it prefills.
        theirs, (ours, steps) = await asyncio.gather(
            self._aggregated_all(Path(command.model_path), tasks), through()
        )
        rows = [
            [rows_of(*each) for each in zip(tasks, theirs, samples, strict=True)]
            for samples in ours
        ]
        return rows, steps

    async def _aggregated_all(self, model_path: Path, tasks: Sequence[Task]) -> list[list[str]]:
        return [await self._aggregated(model_path, asked) for asked in tasks]

    async def _through(
        self,
        command: Command,
        environment: Mapping[str, str],
        tasks: Sequence[Task],
        directory: Path,
    ) -> tuple[list[list[Sample]], int]:
        """What the harness has of each task, asked through a stack, and the stack's steps."""
        python = self.gateway.lm_eval_python
        async with gateway.running(command, {**self.environment, **environment}):
            if command is self.gateway.main:
                self._ran = gateway.read_fingerprints(command)
            samples = [await self.score(python, command, asked, directory) for asked in tasks]
            return samples, await gateway.steps_run(command)

    async def _aggregated(self, model_path: Path, asked: Task) -> list[str]:
        """What a plain vLLM engine answers, as a client would read it."""
        tokenizer = Tokenizer.load(model_path)
        plain = PlainSettings(
            model_path=model_path,
            dtype=self.settings.dtype,
            block_size_tokens=self.settings.block_size_tokens,
            length_max_tokens=self.settings.model_len_max_tokens,
        )
        sampling = Sampling(
            max_tokens=asked.tokens_max,
            temperature=0.0,
            stop_token_ids=stop_ids(tokenizer, asked.stop),
            eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
        )
        prompts = [tokenizer.encode(item.prompt) for item in asked.items]
        answers = await answer(plain, [Question(ids, sampling) for ids in prompts])
        return [
            text_of(tokenizer, ids, found.token_ids, asked.stop)
            for ids, found in zip(prompts, answers, strict=True)
        ]


def stop_ids(tokenizer: Tokenizer, stop: str) -> tuple[int, ...]:
    """The token that is a stop string, so that the plain engine ends there; none if it is several.

    What a longer token that holds the string adds is cut off with it, by `text_of`.
    """
    ids = tokenizer.encode(stop, add_special_tokens=False)
    return tuple(ids) if len(ids) == 1 else ()


def text_of(
    tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int], stop: str
) -> str:
    """The text up to a stop string, as the gateway makes it."""
    options = TextOptions(stop=(stop,), stop_token_ids=tokenizer.eos_token_ids)
    stream = TextStream(tokenizer, options, prompt)
    first = stream.push(token_ids)
    return first.text + ("" if first.stopped else stream.finish().text)


def rows_of(asked: Task, theirs: Sequence[str], samples: Sequence[Sample]) -> dict[str, Any]:
    """Both answers to each item that was scored."""
    items = asked.items
    return {
        "items_asked": len(items),
        "items": [
            {
                "kind": items[sample.place].kind,
                "answer": items[sample.place].answer,
                "ours": sample.text,
                "theirs": theirs[sample.place],
                "right": sample.is_right,
            }
            for sample in samples
        ],
    }
