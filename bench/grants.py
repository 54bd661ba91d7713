"""What grants are worth and what they cost, as JSON on stdout.

    python -m bench.grants --seeds 10000 > bench/results/grants.json

`snapshot`: one rank is 10 below the others, then one request comes for each
router before any count is refreshed. `steady`: requests come and go for a minute.
Both place by vLLM's global minimum, by two choices on the same stale counts, and
by grants. `safety`: worlds of crashing routers on a network that delays, loses and
repeats, where a ledger counts what was promised. `cost_us`: the desk's own time.
"""

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from bench.grant_policies import ByCounts, ByGrants, Policy, global_minimum, two_choices
from bench.provenance import provenance
from splitwave.core.grant import Ask, DeskSettings, Grant, GrantDesk, GrantTable
from tests.sim.grant_world import World

ROUTERS, RANKS, SEATS, LOAD, BELOW = 64, 32, 32, 20, 10
REFRESH_S, HOLD_S, STEADY_S = 0.1, 2.0, 60.0
TRIALS = 200
PATHS = [
    *(f"splitwave/core/{name}.py" for name in ("grant", "grant_table", "due")),
    "services/router/grants.py",
    "bench/grants.py",
    "bench/grant_policies.py",
    *(f"tests/sim/grant_{name}.py" for name in ("world", "worker", "router")),
]

Make = Callable[[list[int], random.Random], Policy]
POLICIES: dict[str, Make] = {
    "vllm_global_minimum": lambda load, rng: ByCounts(load, ROUTERS, global_minimum, rng),
    "two_choices_on_stale_counts": lambda load, rng: ByCounts(load, ROUTERS, two_choices, rng),
    "grants": lambda load, rng: ByGrants(load, ROUTERS, SEATS),
}


def snapshot(make: Make, seed: int) -> tuple[int, float]:
    """Highest load of a rank, and its ratio to the mean, after one request a router on average."""
    rng = random.Random(seed)
    policy = make([LOAD - BELOW] + [LOAD] * (RANKS - 1), rng)
    for _ in range(ROUTERS):
        policy.place(rng.randrange(ROUTERS), 0.0)
    return max(policy.load), max(policy.load) / statistics.fmean(policy.load)


def steady(make: Make, seed: int) -> dict[str, float]:
    """A minute at a mean load of LOAD a rank, sampled at each refresh."""
    rng = random.Random(seed)
    policy = make([0] * RANKS, rng)
    rate = LOAD * RANKS / HOLD_S
    ends: list[tuple[float, int]] = []
    now_s, refresh_s, placed, late, ratios = 0.0, REFRESH_S, 0, 0, []
    while now_s < STEADY_S:
        now_s += rng.expovariate(rate)
        while ends and ends[0][0] <= now_s:
            at_s, request = heapq.heappop(ends)
            policy.end(request, at_s)
        if now_s >= refresh_s:
            refresh_s += REFRESH_S
            policy.refresh()
            if now_s > 5 * HOLD_S:
                ratios.append(max(policy.load) / statistics.fmean(policy.load))
        name = policy.place(rng.randrange(ROUTERS), now_s)
        if name is not None:
            placed += 1
            heapq.heappush(ends, (now_s + rng.expovariate(1 / HOLD_S), name))
        late += max(policy.load) > SEATS
    asked = policy.asked / placed if isinstance(policy, ByGrants) else None
    return {
        "max_over_mean_average": round(statistics.fmean(ratios), 3),
        "max_over_mean_p99": round(statistics.quantiles(ratios, n=100)[98], 3),
        "arrivals_with_a_rank_over_its_seats": round(late / placed, 4),
    } | ({} if asked is None else {"share_that_asked": round(asked, 4)})


def compare() -> dict[str, dict[str, object]]:
    """Each policy in both scenarios."""
    report: dict[str, dict[str, object]] = {"snapshot": {}, "steady": {}}
    for name, make in POLICIES.items():
        runs = [snapshot(make, seed) for seed in range(TRIALS)]
        report["snapshot"][name] = {
            "max_load_average": round(statistics.fmean(high for high, _ in runs), 2),
            "max_over_mean_average": round(statistics.fmean(ratio for _, ratio in runs), 3),
            "max_over_mean_worst": round(max(ratio for _, ratio in runs), 3),
        }
        report["steady"][name] = steady(make, 0)
    return report


def safety(seeds: int) -> dict[str, object]:
    """Run the worlds; an AssertionError with its seed ends the program."""
    began_s, full, crashes, seated, faults, used_max = time.process_time(), 0, 0, 0, 0, 0.0
    for seed in range(seeds):
        try:
            result = World(seed).run()
        except AssertionError as error:
            raise SystemExit(f"seed {seed}: {error}") from error
        full += result.used_max == 1.0
        used_max = max(used_max, result.used_max)
        crashes += result.crashes
        seated += result.seated
        faults += sum(n for (_, fault), n in result.met.items() if fault != "none")
    return {
        "seeds": seeds,
        "violations": 0,
        "seats_promised_over_seats_max": used_max,
        "seeds_that_filled_every_seat": full,
        "router_crashes": crashes,
        "messages_delayed_lost_or_repeated": faults,
        "attempts_seated": seated,
        "cpu_s": round(time.process_time() - began_s, 1),
    }


class Stopwatch:
    """Wall time of named steps."""

    def __init__(self) -> None:
        self._spent_s: dict[str, list[float]] = {}
        self._began_s = 0.0

    def start(self) -> None:
        """A step begins."""
        self._began_s = time.perf_counter()

    def stop(self, name: str) -> None:
        """It has ended, and the next begins."""
        spent_s = time.perf_counter() - self._began_s
        self._spent_s.setdefault(name, []).append(spent_s)
        self.start()

    def medians_us(self) -> dict[str, float]:
        """Median microseconds of each step, which other work on the machine disturbs least."""
        return {k: round(statistics.median(v) * 1e6, 2) for k, v in self._spent_s.items()}


class Desk:
    """The production desk at full size, with what its routers hold."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.table = GrantTable(ranks=RANKS, seats_per_rank=SEATS, blocks_per_rank=SEATS * 64)
        self.desk = GrantDesk(self.table, DeskSettings(ttl_s=2.0))
        self.floats: dict[str, list[Grant]] = {f"s{i}": [] for i in range(ROUTERS)}
        self.seated: list[str] = []
        for session_id in self.floats:
            self.desk.open(session_id)
        self.settle(0.0)

    def settle(self, now_s: float) -> None:
        """Hand out, and let routers have it."""
        for told in self.desk.settle(now_s):
            if isinstance(told, Grant):
                self.floats[told.session_id].append(told)

    def request(self, name: str, now_s: float, watch: Stopwatch) -> None:
        """One request, by an ask or from the float; beyond the mean load another one ends."""
        session_id = self.rng.choice(list(self.floats))
        live = [g for g in self.floats[session_id] if g.expires_at_s > now_s]
        watch.start()
        if not live or self.rng.random() < 0.3:
            self.desk.ask(Ask(session_id, name, 20, now_s + 1), now_s)
            watch.stop("ask")
            self.settle(now_s)
            watch.stop("settle_after_ask")
            live = [g for g in self.floats[session_id] if g.expires_at_s > now_s]
        grant = live.pop(0)
        self.floats[session_id] = live
        watch.start()
        self.table.take(session_id, grant.grant_id, 8, now_s + 30)
        watch.stop("take")
        self.table.spend(session_id, grant.grant_id, name)
        watch.stop("spend")
        self.settle(now_s)
        watch.stop("settle_after_spend")
        self.seated.append(name)
        if len(self.seated) > LOAD * RANKS:
            ended = self.seated.pop(self.rng.randrange(len(self.seated)))
            watch.start()
            self.desk.freed(ended, now_s)
            watch.stop("free")
            self.settle(now_s)
            watch.stop("settle_after_free")

    def crowd(self, now_s: float, watch: Stopwatch) -> None:
        """A thousand asks that wait because nothing fits: what each settle costs then."""
        for i in range(1_000):
            session_id = f"s{i % ROUTERS}"
            self.desk.ask(Ask(session_id, f"crowd{i}", SEATS * 64, now_s + 60), now_s)
        for i in range(1_000):
            watch.start()
            self.settle(now_s + i * 1e-6)
            watch.stop("settle_with_1000_asks_waiting")


def cost_us() -> dict[str, float]:
    """Median microseconds of each step of a request, at 64 sessions, 32 ranks and 1,024 seats."""
    desk, watch = Desk(), Stopwatch()
    for i in range(20_000):
        desk.request(f"a{i}", i * 0.002, watch)
    desk.crowd(20_000 * 0.002, watch)
    return watch.medians_us()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1_000, help="worlds of the safety part")
    args = parser.parse_args()
    report = provenance(f"python -m bench.grants --seeds {args.seeds}", paths=PATHS, packages=[])
    report |= {
        "routers": ROUTERS,
        "ranks": RANKS,
        "seats_per_rank": SEATS,
        "load_per_rank": LOAD,
        "one_rank_below_by": BELOW,
        "snapshot_trials": TRIALS,
        "steady_hold_s": HOLD_S,
        "steady_refresh_s": REFRESH_S,
    }
    report |= compare()
    report["cost_us"] = cost_us()
    report["safety"] = safety(args.seeds)
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
