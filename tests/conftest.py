"""What each folder of tests may take and need."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

HERE = Path(__file__).parent

TIMEOUT_S = {
    "unit": 20,
    "contract": 60,
    "sim": 120,
    "integration": 60,
    "e2e": 600,
    "chaos": 600,
    "clients": 300,
}
"""Time limit of one test, by folder; a test may set its own with `pytest.mark.timeout`."""

HAS_TORCH = importlib.util.find_spec("torch") is not None
ALL_CLIENTS = os.environ.get("SPLITWAVE_CLIENTS") == "all"
"""Also the clients with large environments: `make clients-all`."""
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))

# What imports vLLM or torch at its top cannot even be collected without them.
collect_ignore_glob = [] if HAS_TORCH else ["e2e/test_*", "chaos/test_*", "*/test_vllm_*"]
if not ALL_CLIENTS:
    collect_ignore_glob.append("clients/test_evaluators.py")


SEEDS = int(os.environ.get("SPLITWAVE_SIM_SEEDS", "200"))
"""How many seeds each simulation runs: `make sim SEEDS=1000`."""

# The same examples each time, and no verdict on a busy machine's speed.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Hear Ctrl-C even where a shell began this run behind itself, with SIGINT ignored.

    Programs that the tests start and interrupt would inherit that, and Python keeps it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say loudly what this run leaves out."""
    left_out = ", ".join(collect_ignore_glob)
    why = "" if HAS_TORCH else "no torch here, "
    return f"splitwave: {why}NOT RUN: {left_out}" if left_out else "splitwave: all tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its folder's marker and time limit; skip what needs a GPU where none is."""
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("e2e", "chaos", "clients"):
            item.add_marker(getattr(pytest.mark, folder))
        if folder in TIMEOUT_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S[folder]))
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(
                pytest.mark.skip(reason="NOT RUN: needs a GPU, and this machine has none")
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each simulation that takes a `seed` and names none once a seed."""
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "seed" in metafunc.fixturenames and not any("seed" in names for names in own):
        metafunc.parametrize("seed", range(SEEDS))


@pytest.fixture(autouse=True)
def no_blocking_call_on_the_loop(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Fail an integration test in which our own code blocks the event loop.

    A test that needs an exception asks for this fixture and calls `functions[...]` on it.
    """
    if request.path.relative_to(HERE).parts[0] != "integration":
        yield None
        return
    with blockbuster_ctx(["splitwave", "services"]) as blockbuster:
        yield blockbuster
