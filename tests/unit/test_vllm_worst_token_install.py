"""The wrappers around vLLM's seams: what they count, hand out and keep, without a GPU."""

# ruff: noqa: SLF001  # each wrapper is tested by itself; only install puts them in place

import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # vLLM's objects are untyped here

import pytest
import torch
import vllm.v1.worker.gpu.model_runner  # noqa: F401  # imported by `install`, and it takes long
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

from splitwave.engine.vllm.worst_token import gate, install, wedge
from splitwave.engine.vllm.worst_token.transport import State, Transport

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    """A worker's state of this test alone; nothing is captured unless it says so."""
    found = State()
    monkeypatch.setattr(install, "state", found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def launched(state: State) -> dict[str, int]:
    """Collectives that run or ran, by kind and microbatch."""
    found = state.log.report({}, 0.0)["collectives"]
    return {f"{one['kind']}/{one['microbatch']}": one["launched"] for one in found}


class Manager:
    """vLLM's graph manager as far as it warms up and captures each of its sizes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def capture(self, create: Any, progress_bar_desc: str = "") -> None:
        for desc in ("64", "128"):
            create(desc, warmup=True)("NONE")
            forward = create(desc, warmup=False)
            self.capturing = True
            forward("NONE")
            self.capturing = False


def model(state: State, seen: list[tuple[str, bool, bool]], layers: dict[str, int]) -> Any:
    """Return what makes a forward of so many layers, two microbatches each."""

    def create(desc: str, warmup: bool) -> Any:
        def forward(mode: str) -> str:
            seen.append((desc, warmup, state.is_worst()))
            for _ in range(layers[desc]):
                for at in (0, 1):
                    state.log.launched("dispatch", at)
                    state.log.launched("combine", at)
            return mode

        return forward

    return create


def test_a_graph_holds_its_own_collectives_and_its_warm_up_takes_its_path(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool, bool]] = []
    capture = install._recorded(Manager.capture)
    capture(Manager(monkeypatch), model(state, seen, {"64": 3, "128": 2}), "graphs")

    assert seen == [
        ("64", True, True), ("64", False, True), ("128", True, True), ("128", False, True),
    ]  # fmt: skip
    assert not state.warming
    kinds = ("dispatch/0", "combine/0", "dispatch/1", "combine/1")
    assert state.log.collectives_a_graph() == {
        "64": dict.fromkeys(kinds, 3),
        "128": dict.fromkeys(kinds, 2),
    }
    assert launched(state) == dict.fromkeys(kinds, 5), "warm-ups run; captures do not"

    replay = install._replayed(lambda _manager, desc: f"replayed {desc}")
    assert replay(None, "128") == "replayed 128"
    assert launched(state) == dict.fromkeys(kinds, 7)
    assert state.replays_in_flight
    assert state.log.replays == 1


def test_a_capture_that_fails_leaves_nothing_switched_on(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(monkeypatch)
    manager.capturing = True

    def fails(_mode: str) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        install._as_graph(fails, "64")("NONE")

    assert not state.warming
    state.log.launched("dispatch")
    assert launched(state) == {"dispatch/0": 1}, "what follows is not the graph's"


def test_a_replay_counts_before_it_can_hang(state: State) -> None:
    state.log.begin_recording("64")
    state.log.launched("dispatch")
    state.log.end_recording()
    during: list[dict[str, int]] = []

    install._replayed(lambda _manager, _desc: during.append(launched(state)))(None, "64")

    assert during == [{"dispatch/0": 1}]


@pytest.mark.parametrize(
    ("mode", "microbatches", "kind"),
    [
        (CUDAGraphMode.FULL, 1, "full"),
        (CUDAGraphMode.FULL, 2, "ubatched_full"),
        (CUDAGraphMode.NONE, 1, "eager"),
        (CUDAGraphMode.NONE, 2, "ubatched_eager"),
    ],
)
def test_an_agreed_step_is_named_and_the_wait_for_it_is_a_phase(
    state: State, mode: CUDAGraphMode, microbatches: int, kind: str
) -> None:
    phases: list[str] = []

    def agree(*_args: Any, **_kwargs: Any) -> Any:
        phases.append(state.log.phase)
        return SimpleNamespace(cg_mode=mode, num_ubatches=microbatches, num_tokens=96), "sync"

    found = install._agreed(agree)("manager", 3, dp_size=2)

    assert found[1] == "sync"
    assert phases == ["agree"]
    assert (state.log.phase, state.log.steps) == ("launch", 1)
    assert (state.log.step_kind, state.log.step_tokens) == (kind, 96)


@pytest.mark.parametrize(
    ("wrap", "after"),
    [(install._agreed, "launch"), (lambda call: install._in_phase("vote", call), "idle")],
)
def test_a_wait_that_fails_is_over(state: State, wrap: Any, after: str) -> None:
    def fails() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        wrap(fails)()

    assert state.log.phase == after
    assert state.log.steps == 0


def test_a_vote_is_a_phase_and_its_answer_is_passed_on(state: State) -> None:
    phases: list[str] = []

    def vote(core: str, local: bool) -> bool:
        phases.append(state.log.phase)
        return core == "core" and local

    assert install._in_phase("vote", vote)("core", True) is True
    assert phases == ["vote"]
    assert state.log.phase == "idle"


def test_each_buffer_has_one_transport_whichever_layer_asks() -> None:
    buffers = {"a": object(), "b": object()}
    owners: list[Any] = []

    def make(owner: Any, buffer: Any) -> Any:
        owners.append(owner)
        return SimpleNamespace(of=buffer)

    get = install._handed(lambda _manager, kwargs: buffers[kwargs["which"]], make)
    first, again = get("manager", {"which": "a"}), get("manager", {"which": "a"})
    other = get("manager", {"which": "b"})

    assert first is again
    assert first is not other
    assert (first.of, other.of) == (buffers["a"], buffers["b"])
    assert owners == ["manager", "manager"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_are_kept_for_the_high_throughput_backend(ranks: int) -> None:
    decide = CompilationConfig.set_splitting_ops_for_v1

    def mode_after(decided: Any) -> CUDAGraphMode:
        config = CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY
        )
        decided(config, all2all_backend="deepep_high_throughput", data_parallel_size=ranks)
        return config.cudagraph_mode

    assert mode_after(install._graphs_kept(decide)) == CUDAGraphMode.FULL_DECODE_ONLY
    assert (mode_after(decide) == CUDAGraphMode.NONE) is (ranks > 1), "else it wraps nothing"


def test_profiling_takes_the_worst_case_and_only_profiling(state: State) -> None:
    during: list[bool] = []

    def profile(runner: str, randomize_inputs: bool = False) -> tuple[str, bool]:
        during.append(state.is_worst())
        return runner, randomize_inputs

    assert install._reserving(profile)("runner", randomize_inputs=True) == ("runner", True)
    assert (during, state.is_worst()) == ([True], False)

    def fails(_runner: str) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        install._reserving(fails)("runner")
    assert not state.is_worst()


class Watched:
    """vLLM's manager around a capture, and the watches that were started after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[wedge.Place] = []
        self._capture_mem_samples: list[int] | None = None
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=1, data_parallel_size=2)
        )
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr("gc.freeze", lambda: None)
        monkeypatch.setattr(
            wedge, "start", lambda _watch, place, _latest: self.places.append(place)
        )
        self.captured = install._watched_after(lambda _self: None)


def test_waits_are_bounded_once_graphs_are_captured_and_by_one_watch(
    state: State, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPLITWAVE_WEDGE_DIR", str(tmp_path))
    watched = Watched(monkeypatch)
    state.log.launched("dispatch")

    watched._capture_mem_samples = []
    watched.captured(watched)
    assert watched.places == [], "vLLM only measures: it captures again"

    watched._capture_mem_samples = None
    watched.captured(watched)
    watched.captured(watched)
    assert watched.places == [wedge.Place(rank=1, ranks=2, directory=tmp_path)]
    assert set(launched(state).values()) == {0}, "counted on from the device's own numbers"


@pytest.mark.parametrize(
    ("listed", "worst", "trusted"),
    [([], False, False), ([0, 0], False, True), ([2, 1], False, True), ([2, 1], True, False)],
)
def test_counts_are_trusted_only_where_a_host_has_counted(
    state: State, listed: list[int], worst: bool, trusted: bool
) -> None:
    state.warming = worst
    counts = SimpleNamespace(expert_num_tokens_cpu=torch.tensor(listed, dtype=torch.int32))

    class Base:
        def _receiver(self, *args: Any, **kwargs: Any) -> Any:
            return "rows", args, counts, kwargs, "weights"

    found = install._without_host_counts(Base)()._receiver(1, defer_input_quant=True)

    assert found == (
        "rows",
        (1,),
        counts if trusted else None,
        {"defer_input_quant": True},
        "weights",
    )


def test_a_configuration_is_checked_before_its_graphs_are_made() -> None:
    made: list[Any] = []
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=2, enable_expert_parallel=True, use_ubatching=False,
            all2all_backend="deepep_v2",
        ),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[64, 128]),
        scheduler_config=SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=128),
        use_v2_model_runner=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPLITWAVE_COLLECTIVE_MARKS", "0")
        patched.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
        gated = install._gated(lambda *args, **_: made.append(args), Transport.V2)
        gated("manager", config, "cuda", CUDAGraphMode.FULL_DECODE_ONLY, 1)
        with pytest.raises(gate.WorstTokenRefused, match="rule whole_step"):
            gated("manager", config, "cuda", CUDAGraphMode.FULL, 1)

    assert made == [("manager", config, "cuda", CUDAGraphMode.FULL_DECODE_ONLY, 1)]


def test_all_layers_share_one_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config
    import vllm.distributed.parallel_state

    group = SimpleNamespace(device_group=SimpleNamespace(size=lambda: 2))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=160))
    monkeypatch.setattr(vllm.distributed.parallel_state, "get_ep_group", lambda: group)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    manager = types.SimpleNamespace()

    first = install._bridged(manager, {})

    assert install._bridged(manager, {}) is first
    assert (first.tokens_max, first.group_size) == (160, 2)
    assert install._bridged(types.SimpleNamespace(), {}) is not first


INSTALLED = """
import sys
from splitwave.engine.vllm import seams
from splitwave.engine.vllm.worst_token import fit, handover, install
from vllm.config.compilation import CompilationConfig
from vllm.distributed.device_communicators import all2all
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.worker import ubatching
from vllm.v1.worker.gpu import cudagraph_utils, dp_utils, model_runner, ubatch_utils

PLACES = {
    "decide": (CompilationConfig, "set_splitting_ops_for_v1"),
    "ht": (all2all.DeepEPHTAll2AllManager, "get_handle"),
    "v2": (all2all.DeepEPV2All2AllManager, "get_handle"),
    "init": (cudagraph_utils.ModelCudaGraphManager, "__init__"),
    "capture": (cudagraph_utils.ModelCudaGraphManager, "capture"),
    "replay": (cudagraph_utils.ModelCudaGraphManager, "run_fullgraph"),
    "record": (cudagraph_utils.CudaGraphManager, "capture"),
    "agree": (model_runner, "dispatch_cg_and_sync_dp"),
    "vote": (DPEngineCoreProc, "_has_global_unfinished_reqs"),
    "profile": (model_runner.GPUModelRunner, "profile_run"),
    "contexts": (ubatch_utils, "make_ubatch_contexts"),
    "barrier": (ubatch_utils.UBatchRunner, "__init__"),
    "leave": (ubatching.UBatchContext, "__exit__"),
    "plain": (dp_utils, "sync_cudagraph_and_dp_padding"),
}

def now():
    return {name: getattr(*place) for name, place in PLACES.items()}

seams.check_seams(fit.SEAMS)
before = now()
put_in = handover.install if sys.argv[1] == "eager" else lambda: install.install(sys.argv[1])
put_in()
once = now()
put_in()
assert now() == once, "installed twice"
print(" ".join(sorted(name for name in PLACES if once[name] is not before[name])))
"""
EVERYWHERE = {
    "decide", "ht", "init", "capture", "replay", "record", "agree", "vote", "profile", "contexts",
    "barrier", "leave", "plain",
}  # fmt: skip


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("transport", "places"),
    [
        ("v2", EVERYWHERE | {"v2"}),
        ("legacy", EVERYWHERE),
        # Eager microbatches hand over too; a step that cannot be split has no graph to replay.
        ("eager", {"contexts", "barrier", "leave"}),
    ],
)
def test_each_seam_is_wrapped_once(transport: str, places: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, transport],
        cwd=ROOT, capture_output=True, text=True, timeout=170, check=False,
        env=os.environ | {"VLLM_PLUGINS": ""},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split("\n")[-2].split()) == places
