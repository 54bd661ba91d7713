"""Which demo model to build: the variants, their options and where they are kept."""

import enum
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

RECIPE: Final = 1
"""Raised whenever the same options give another model; older builds are then built again."""


class DemoModelError(Exception):
    """A demo model cannot be built; the message says why and what to do."""


class Variant(enum.StrEnum):
    """The demo models. docs/demo-model.md says what each proves."""

    IDENTICAL = "identical"
    """SmolLM2 with its feed-forward copied to every expert: the dense model's text."""
    DISTINCT = "distinct"
    """Experts that differ a little: a token sent to a wrong expert changes logprobs."""
    DENSE = "dense"
    """SmolLM2 as it is, the oracle for `identical`."""
    TINY = "tiny"
    """Random, two layers, one token a byte: for tests that need any model, fast."""


class Dtype(enum.StrEnum):
    """Format of the weights, in the names of config.json."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one weight."""
        return 4 if self is Dtype.FLOAT32 else 2


EXPERTS_MAX = 256
"""A layer. Each of them is a copy of the dense layer, 106 MB over the model in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelOptions:
    """All that decides what a build contains.

    float32 is the default: equality tests need it, and CPUs without bfloat16
    arithmetic are several times faster with it.
    """

    variant: Variant = Variant.IDENTICAL
    experts: int | None = None
    """None: 8 for tiny, none for dense, else 4."""
    experts_per_token: int = 2
    expert_spread: float = 0.05
    """How much experts of `distinct` differ. From about 0.15 on the text suffers."""
    router_gain: float = 2.0
    """Standard deviation of the router's logits."""
    seed: int = 7
    dtype: Dtype = Dtype.FLOAT32

    def __post_init__(self) -> None:
        if self.variant is Variant.DENSE:
            if self.experts is not None:
                raise DemoModelError("--experts: the dense variant has no experts; leave it out")
        elif self.expert_count < self.experts_per_token:
            raise DemoModelError(
                f"--experts: {self.expert_count} is less than the {self.experts_per_token} that"
                " each token uses; give at least that many"
            )
        elif self.expert_count > EXPERTS_MAX:
            raise DemoModelError(f"--experts: {self.expert_count} is more than {EXPERTS_MAX}")

    @property
    def expert_count(self) -> int:
        """Experts a layer; 0 for the dense model."""
        if self.experts is not None:
            return self.experts
        return {Variant.TINY: 8, Variant.DENSE: 0}.get(self.variant, 4)

    def as_json(self) -> dict[str, object]:
        """The recipe as the stamp records it; equal recipes give equal models."""
        return {"recipe": RECIPE, **asdict(self), "experts": self.expert_count}


def default_dir(name: str) -> Path:
    """Where the demo model of this name is kept unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "splitwave" / "models" / name
