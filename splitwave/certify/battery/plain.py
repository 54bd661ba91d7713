"""The oracle of a full battery: a plain vLLM engine, asked for each case once."""

from collections.abc import Sequence

from splitwave.certify.battery.bench import Generate
from splitwave.certify.battery.cases import Case, Generated
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.engine.vllm.aggregated import AggregatedFailed, PlainSettings, Question, answer
from splitwave.engine.vllm.config import VllmGroupSettings


class PlainOracle:
    """What a plain engine answers. Both subjects of a battery ask for much the same."""

    def __init__(self) -> None:
        self._known: dict[str, Generated] = {}

    def of(self, settings: VllmGroupSettings) -> Generate:
        """Generates on an engine of a group's model and precision, started if it must be.

        What it gives raises CheckBroken if that engine cannot answer.
        """
        plain = PlainSettings(
            model_path=settings.model_path,
            dtype=settings.dtype,
            block_size_tokens=settings.block_size_tokens,
            length_max_tokens=settings.model_len_max_tokens,
        )

        known = self._known

        async def generate(cases: Sequence[Case]) -> list[Generated]:
            named = [f"{plain} {case}" for case in cases]
            new = {name: case for name, case in zip(named, cases, strict=True) if name not in known}
            if new:
                asked = [Question(case.token_ids, case.sampling) for case in new.values()]
                try:
                    answers = await answer(plain, asked)
                except AggregatedFailed as failed:
                    raise CheckBroken(f"the plain engine cannot answer: {failed}") from failed
                for name, said in zip(new, answers, strict=True):
                    known[name] = Generated(said.token_ids, said.logprobs)
            return [known[name] for name in named]

        return generate
