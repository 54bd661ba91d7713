"""Ids of one group, as the vLLM adapter keeps them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from splitwave.engine.vllm.ledger import TOMBSTONES_MAX, Admission, Ledger

TTL_S = 30.0


def prefill() -> Ledger:
    return Ledger(lease_ttl_s=TTL_S, pulls=False)


def decode() -> Ledger:
    return Ledger(lease_ttl_s=TTL_S, pulls=True)


def admit(ledger: Ledger, name: str, now_s: float = 0.0, rank: int = 0) -> Admission:
    return ledger.admit(name, rank=rank, hold=True, now_s=now_s)


def test_a_new_id_runs() -> None:
    ledger = prefill()

    assert admit(ledger, "a") is Admission.RUN
    running = ledger.running("a")
    assert running is not None
    assert running.hold


def test_an_id_that_runs_is_refused() -> None:
    ledger = prefill()
    admit(ledger, "a")

    assert admit(ledger, "a") is Admission.REFUSE


def test_an_id_that_is_held_is_refused_until_its_lease_is_over() -> None:
    ledger = prefill()
    admit(ledger, "a")
    ledger.held("a", expires_at_s=10.0)

    assert admit(ledger, "a", now_s=10.0 + TTL_S - 1) is Admission.REFUSE
    assert admit(ledger, "a", now_s=10.0 + TTL_S) is Admission.RUN


def test_an_ended_id_is_not_wanted_any_more() -> None:
    ledger = prefill()
    admit(ledger, "a")

    ledger.ended("a")

    assert ledger.running("a") is None


def test_a_release_of_a_running_request_aborts_it_and_then_releases() -> None:
    ledger = prefill()
    admit(ledger, "a", rank=3)

    release = ledger.released(["a"], 0.0)

    assert (release.abort, dict(release.by_rank), release.unknown) == (["a"], {3: ["a"]}, [])
    assert ledger.running("a") is None


def test_a_release_of_a_held_request_goes_to_its_rank_once() -> None:
    ledger = prefill()
    admit(ledger, "a", rank=2)
    ledger.held("a", expires_at_s=10.0)

    assert dict(ledger.released(["a"], 0.0).by_rank) == {2: ["a"]}
    assert dict(ledger.released(["a"], 0.0).by_rank) == {}


def test_a_release_may_overtake_its_request() -> None:
    ledger = prefill()

    release = ledger.released(["a"], 0.0)

    assert release.unknown == ["a"]
    assert admit(ledger, "a", now_s=TTL_S - 1) is Admission.RUN_WITHOUT_HOLD
    running = ledger.running("a")
    assert running is not None
    assert not running.hold


def test_a_tombstone_has_its_time() -> None:
    ledger = prefill()
    ledger.released(["a"], 0.0)

    assert admit(ledger, "a", now_s=TTL_S) is Admission.RUN


def test_tombstones_are_bounded_and_the_oldest_go_first() -> None:
    ledger = prefill()

    ledger.released([str(n) for n in range(TOMBSTONES_MAX + 1)], 0.0)

    ledger.check()
    assert admit(ledger, "0") is Admission.RUN
    assert admit(ledger, "1") is Admission.RUN_WITHOUT_HOLD


def test_the_end_of_an_aborted_pull_is_told_once() -> None:
    ledger = decode()
    admit(ledger, "a")

    assert ledger.aborted(["a", "unknown"]) == ["a"]
    assert [ledger.pull_ended("a"), ledger.pull_ended("a")] == [True, False]


def test_an_id_whose_pull_still_runs_is_refused() -> None:
    ledger = decode()
    admit(ledger, "a")
    ledger.aborted(["a"])

    assert admit(ledger, "a") is Admission.REFUSE


def test_a_request_with_an_output_pulls_no_more() -> None:
    ledger = decode()
    admit(ledger, "a")
    running = ledger.running("a")
    assert running is not None
    running.started = True

    ledger.aborted(["a"])

    assert not ledger.pull_ended("a")


def test_what_is_held_is_listed_by_rank() -> None:
    ledger = prefill()
    for name, rank in (("a", 0), ("b", 1), ("c", 0)):
        admit(ledger, name, rank=rank)
        ledger.held(name, expires_at_s=10.0)

    assert ledger.holding() == {0: ["a", "c"], 1: ["b"]}


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order, the invariants hold."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = prefill()
        self.now_s = 0.0

    names = st.sampled_from("abcd")

    @rule(name=names, hold=st.booleans())
    def admit(self, name: str, hold: bool) -> None:
        self.ledger.admit(name, rank=0, hold=hold, now_s=self.now_s)

    @rule(name=names)
    def finish(self, name: str) -> None:
        running = self.ledger.running(name)
        if running is not None and running.hold:
            self.ledger.held(name, self.now_s + TTL_S)
        else:
            self.ledger.ended(name)

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.ledger.aborted([name])

    @rule(name=names)
    def release(self, name: str) -> None:
        self.ledger.released([name], self.now_s)

    @rule(seconds=st.floats(0.0, TTL_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds(self) -> None:
        self.ledger.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
