"""What runs eagerly on a CPU compiles nothing, not even a sampler's helper."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import _dynamo as dynamo
from torch._dynamo.utils import counters

from splitwave.engine.vllm.eagerly import compile_nothing_more


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch(disable=False):
        yield


def config(*, enforce_eager: bool) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(enforce_eager=enforce_eager))


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_helper_is_compiled_only_where_steps_are(enforce_eager: bool) -> None:
    def above(x: torch.Tensor) -> torch.Tensor:
        return (x >= 1.0).sum(-1)

    helper = torch.compile(above, backend="eager")  # Before the switch, as at an import.

    assert compile_nothing_more(config(enforce_eager=enforce_eager)) is enforce_eager

    assert helper(torch.ones(2, 3)).tolist() == [3, 3]
    assert bool(counters["frames"]["total"]) is not enforce_eager


def test_on_a_gpu_helpers_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: False))

    assert not compile_nothing_more(config(enforce_eager=True))
    assert not dynamo.config.disable
