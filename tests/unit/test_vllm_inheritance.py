"""Groups that start in one process leave each other nothing in the environment."""

from pathlib import Path

import pytest

from splitwave.core.mode import MODES, Device, Mode
from splitwave.engine.port import Role
from splitwave.engine.vllm.config import VllmGroupSettings, environment
from splitwave.engine.vllm.inheritance import Inheritance


def variables(mode: Mode) -> dict[str, str]:
    settings = VllmGroupSettings(
        role=Role(mode.role), mode=mode.name, model_path=Path("m"), served_model="m",
        group_id="g", epoch=1, log_dir=Path("logs"),
    )  # fmt: skip
    return environment(settings, mode)


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_group_inherits_the_same_whatever_group_started_before_it(
    first: str, second: str
) -> None:
    alone, after, again = ({"HOME": "/h"} for _ in range(3))
    for environ, modes in ((alone, [second]), (after, [first, second]), (again, [second] * 2)):
        inherited = Inheritance(environ)
        for name in modes:
            inherited.take_back()
            inherited.give(variables(MODES[name]))

    assert alone == after == again
    assert alone["SPLITWAVE_MODE"] == second


def test_the_case_that_matters_is_among_them() -> None:
    prefill, decode = MODES["prefill_eager_ht"], MODES["decode_graph_ht"]

    assert prefill.device is decode.device is Device.GPU
    assert "SPLITWAVE_WORST_TOKEN" in variables(decode).keys() - variables(prefill).keys()


def test_what_the_user_has_set_comes_back() -> None:
    environ = {"OMP_NUM_THREADS": "7", "OTHER": "x"}
    inherited = Inheritance(environ)

    inherited.give({"OMP_NUM_THREADS": "1", "NEW": "y"})
    assert environ == {"OMP_NUM_THREADS": "1", "NEW": "y", "OTHER": "x"}
    inherited.take_back()
    assert environ == {"OMP_NUM_THREADS": "7", "OTHER": "x"}


def test_what_others_have_changed_since_stays() -> None:
    environ: dict[str, str] = {}
    inherited = Inheritance(environ)
    inherited.give({"A": "1", "B": "1"})
    environ["A"] = "2"
    del environ["B"]

    inherited.take_back()

    assert environ == {"A": "2"}
    inherited.take_back()
    assert environ == {"A": "2"}
