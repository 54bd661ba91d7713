"""What a start does once, for all processes that are forked from it."""

import gc
import weakref
from pathlib import Path

import pytest
import vllm.model_executor.models.mixtral  # noqa: F401  # here, since it takes longer than a test may
from vllm.model_executor.models import ModelRegistry, registry

from splitwave.engine.vllm.start import kept_for_good, know_models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


def test_no_process_imports_vllm_anew_to_ask_what_an_imported_model_can_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "VLLM_CACHE_ROOT", str(tmp_path)
    )  # What an earlier process said is not here.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda ask: pytest.fail("asked anew"))

    know_models()

    assert ModelRegistry.models["MixtralForCausalLM"].inspect_model_cls().supports_pp
    with pytest.raises(pytest.fail.Exception, match="asked anew"):
        ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()


def test_what_is_imported_is_not_looked_through_for_garbage_any_more() -> None:
    before = gc.get_freeze_count()
    try:
        with kept_for_good():
            imported: list[object] = []
            imported.append(imported)
            assert not gc.isenabled()

        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_what_nobody_holds_any_more_is_not_kept_with_it() -> None:
    class Held:
        """What a caller's frame may hold, an open file for one."""

    try:
        with kept_for_good():
            held = Held()
            held.itself = held  # type: ignore[attr-defined]  # the cycle that a kept frame makes
            seen = weakref.ref(held)
            del held
        assert seen() is None
    finally:
        gc.unfreeze()
