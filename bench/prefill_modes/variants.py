"""What is compared: the modes of prefill pools, microbatches with several numbers of SMs."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitwave.core.mode import Mode, StepKind, lookup

COMM_SMS = "VLLM_DBO_COMM_SMS"
THRESHOLD = "dbo_prefill_token_threshold"
WHOLE = "prefill_eager_ht"
SPLIT = "prefill_eager_ht_dbo"
CPU = "prefill_cpu_eager"
SMS_MAX = 20
"""vLLM gives DeepEP's kernels no more: its buffers are made for so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row's engines."""

    name: str
    mode: Mode
    comm_sms: int | None = None
    """Multiprocessors for dispatch and combine beside microbatches; None: no microbatches."""

    @property
    def arguments(self) -> dict[str, object]:
        """vLLM's engine arguments of the mode."""
        return dict(self.mode.vllm_args)

    @property
    def env(self) -> dict[str, str]:
        """Variables of the mode, with this row's number of SMs."""
        own = {} if self.comm_sms is None else {COMM_SMS: str(self.comm_sms)}
        return dict(self.mode.env) | own

    @property
    def threshold_tokens(self) -> int | None:
        """Tokens of the smaller rank from which steps are split; None: never."""
        found = self.mode.vllm_args.get(THRESHOLD)
        assert found is None or isinstance(found, int)
        return found

    def kind_of(self, step_tokens: int) -> str:
        """The kind that a step of so many tokens on every rank has to be."""
        least = self.threshold_tokens
        split = least is not None and step_tokens >= least
        return (StepKind.EAGER_UBATCHED if split else StepKind.EAGER).value


def variants(device: str, sms: Sequence[int], threshold: int | None = None) -> list[Variant]:
    """Rows in the order they run, the one that others are compared with first."""
    if device == "cpu":
        return [Variant(name="whole", mode=lookup(CPU))]
    if strays := [number for number in sms if not 0 < number <= SMS_MAX or number % 2]:
        raise ValueError(f"{strays[0]} SMs: DeepEP takes even numbers, vLLM at most {SMS_MAX}")
    split = lookup(SPLIT)
    if threshold is not None:
        split = dataclasses.replace(split, vllm_args=dict(split.vllm_args) | {THRESHOLD: threshold})
    return [
        Variant(name="whole", mode=lookup(WHOLE)),
        *(Variant(name=f"dbo_sms{number}", mode=split, comm_sms=number) for number in sms),
    ]


def ratio_to_whole(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Tokens/s of each row over those of `whole`, by phase that both have."""
    whole = rows.get("whole", {})
    return {
        name: {phase: rate / whole[phase] for phase, rate in rates.items() if phase in whole}
        for name, rates in rows.items()
        if name != "whole"
    }
