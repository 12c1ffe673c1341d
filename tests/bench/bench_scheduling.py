"""Direct, queue and batch in virtual time: the real core and the stub's real scheduler under one event clock.

Run `python -m tests.bench.bench_scheduling` from the repository root. Load is relative to the capacity that the same
ranks show under least_in_flight with everything offered at once. Every policy gets the same requests in a seed. The
figures are exact for the model and the same on every machine; what the model leaves out is said in docs/benchmarks.md.
"""

import argparse
import os
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import msgspec

from tests.bench.virtual.metrics import Summary, summarise
from tests.bench.virtual.overload import OVERLOADED, Overload, Share, offers_for, overload, share
from tests.bench.virtual.policies import BASELINE, POLICIES, SATURATING
from tests.bench.virtual.report import Result, overload_table, results_of, share_table, table
from tests.bench.virtual.workloads import TRACE, Workload, azure_conv, bursty
from tests.bench.virtual.world import EngineModel, World, configured

ENGINE = EngineModel()
RHOS = (0.7, 0.9)
REQUESTS = 3000
SATURATING_REQUESTS = 6000
BURST_OF_ALL_PER_S = 1000.0
WEIGHTS = ((1.0, 1.0), (3.0, 1.0), (1.0, 3.0))

Cell = tuple[str, int, float, str]
"""Workload, seed, rho (or 0), policy."""


class Bench:
    """What a worker process needs to run any cell; picklable."""

    def __init__(self, requests: int, trace: Path) -> None:
        self.requests = requests
        self._trace = trace
        self._capacities: dict[tuple[str, int], float] = {}

    def offers(self, name: str, seed: int, count: int) -> Workload:
        """A workload by name."""
        return bursty(seed, count) if name == "bursty" else azure_conv(seed, count, self._trace)

    def capacity(self, key: tuple[str, int]) -> float:
        """Requests per second of saturated ranks: the middle half of the finishes when all is offered at once."""
        workload = self.offers(*key, SATURATING_REQUESTS).at_rate(BURST_OF_ALL_PER_S)
        world = World(configured(ENGINE, **SATURATING), workload.offers, ENGINE, key[1]).run()
        ends = sorted(record.ended_at for record in world.records if record.ended_at is not None)
        assert len(ends) == SATURATING_REQUESTS, "nothing is refused here"
        low, high = len(ends) // 4, 3 * len(ends) // 4
        return (high - low) / (ends[high] - ends[low])

    def run(self, capacities: dict[tuple[str, int], float], cell: Cell) -> Summary:
        """One policy, one seed, one load."""
        name, seed, rho, policy = cell
        workload = self.offers(name, seed, self.requests).at_rate(rho * capacities[name, seed])
        world = World(configured(ENGINE, **POLICIES[policy]), workload.offers, ENGINE, seed).run()
        return summarise(world, ENGINE)

    def overload(self, capacity: float, policy: str) -> Overload:
        """One policy at ten times the capacity."""
        return overload(policy, self.offers("azure_conv", 0, offers_for(capacity)), capacity, ENGINE)

    def share(self, capacity: float, case: tuple[str, tuple[float, float]]) -> Share:
        """Two tenants at ten times the capacity."""
        policy, weights = case
        return share(policy, weights, self.offers("azure_conv", 0, offers_for(capacity)), capacity, ENGINE)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="offers per cell and seed")
    parser.add_argument("--rho", type=float, nargs="+", default=RHOS)
    parser.add_argument("--workloads", nargs="+", default=["azure_conv", "bursty"], choices=["azure_conv", "bursty"])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--trace", type=Path, default=TRACE, help="another file with the columns of the trace")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; the figures don't depend on it"
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--parts", nargs="+", default=["load", "overload"], choices=["load", "overload"])
    options = parser.parse_args()
    options.policies = list(dict.fromkeys((BASELINE, *options.policies)))
    return options


def _loads(
    bench: Bench, options: argparse.Namespace, capacities: dict[tuple[str, int], float], pool: Executor
) -> list[Result]:
    """Every workload at every load, printed as they come."""
    results: list[Result] = []
    seeds = range(options.seeds)
    for name, rho in product(options.workloads, options.rho):
        cells = [(name, seed, rho, policy) for policy in options.policies for seed in seeds]
        summaries = pool.map(partial(bench.run, capacities), cells)
        by_policy: dict[str, list[Summary]] = {policy: [] for policy in options.policies}
        for cell, summary in zip(cells, summaries, strict=True):
            by_policy[cell[3]].append(summary)
        cell_results = results_of(name, rho, by_policy)
        results += cell_results
        print("\n" + table(cell_results), flush=True)
    return results


def _overloads(bench: Bench, capacity: float, pool: Executor) -> tuple[list[Overload], list[Share]]:
    overloads = list(pool.map(partial(bench.overload, capacity), OVERLOADED))
    print("\n" + overload_table(overloads), flush=True)
    cases = list(product(("queue", "batch"), WEIGHTS))
    shares = list(pool.map(partial(bench.share, capacity), cases))
    print("\n" + share_table(shares), flush=True)
    return overloads, shares


def main() -> None:
    """Print the tables, and write the JSON file."""
    options = _parse()
    bench = Bench(options.requests, options.trace)
    report: dict[str, object] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        keys = [(name, seed) for name in options.workloads for seed in range(options.seeds)]
        capacities = dict(zip(keys, pool.map(bench.capacity, keys), strict=True))
        print("capacity, requests/s: " + ", ".join(f"{name} {seed}: {c:.1f}" for (name, seed), c in capacities.items()))
        if "load" in options.parts:
            report["load"] = _loads(bench, options, capacities, pool)
        if "overload" in options.parts:
            report["overload"], report["shares"] = _overloads(bench, capacities[keys[0]], pool)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


if __name__ == "__main__":
    main()
