"""Ten times what the ranks can do, against real processes: what is admitted, what is refused, and who gets how much.

Run `python -m tests.bench.bench_overload` from the repository root. `rankgate serve`, four engine-stub ranks whose
steps take a fixed time, and a client are processes of their own, on cores of their own as far as there are any. The
capacity is what the same client gets in a closed loop from the same deployment; then it offers ten times that, come
what may. Refusals are timed by a second client on a connection that carries nothing else, from its call to the
trailers: the gateway's own part is less. Modes direct and queue, one after the other; about a minute and a half.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from gateway.v1 import gateway_pb2
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.deployment import Deployment
from tests.support.processes import ROOT, wait_until

RANKS = 4
SLOTS = 8
"""Sequences that a rank works on at once."""
PER_RANK = 12
"""Sequences that the gateway gives it: with some to spare no slot stands empty between two steps."""
STEP_MS = 40.0
"""With 16 tokens a request that makes some 50 requests a second: ten times as many don't fill the gateway's core."""
QUEUE_DEPTH = 48
MAX_OFFERED_PER_S = 1500.0
SETTLE_S = 1.5
"""Of each run, from its start: not counted."""
WEIGHTS = ((1.0, 1.0), (1.0, 3.0), (3.0, 1.0))
"""Of the tenant that offers ten times as much, and of the other one."""
QUIET = (
    "live_requests",
    "rank_requests_in_flight",
    "rank_requests_without_token",
    "rank_queued_prompt_tokens",
    "rank_context_tokens",
    "tenant_requests_in_flight",
    "tenant_requests_queued",
    "queue_depth",
    "double_releases",
    "double_ends",
    "audit_findings",
)
"""Metrics that must be 0 when nothing is live."""
TARGETS = {"throughput": 0.95, "refusal_p99_ms": 50.0, "share": 0.10}


def deployment(mode, weights=None):
    """One gateway that lets in what the ranks hold, and in the other modes what the queue does."""
    admission = {"max_in_flight": RANKS * PER_RANK}
    sections = {}
    if mode == "direct":
        admission["max_in_flight_per_rank"] = PER_RANK
    else:
        admission |= {"max_in_flight": RANKS * PER_RANK + 2 * QUEUE_DEPTH, "max_queue_depth": QUEUE_DEPTH}
        sections["scheduling"] = {"mode": mode, "queue": {"order": "fcfs", "max_in_flight_per_rank": PER_RANK}}
    if weights is not None:
        named = {name: {"weight": weight} for name, weight in zip(("big", "small"), weights, strict=True)}
        admission["tenants"] = {"named": named}
    stub = {"scheduler": {"max_active": SLOTS}}
    return Deployment(
        "vllm",
        ranks=RANKS,
        step_ms=STEP_MS,
        stub=stub,
        group={"min_ready": RANKS},
        admission=admission,
        **sections,
    )


class Cores:
    """Which core each process gets: the gateway one of its own, the others what is left."""

    def __init__(self):
        self._cores = sorted(os.sched_getaffinity(0))

    def pin(self, pid, number):
        """Every thread that the process has; new ones inherit it. Process 0 is the gateway."""
        if len(self._cores) < 2:
            return
        core = self._cores[0] if number == 0 else self._cores[1:][(number - 1) % (len(self._cores) - 1)]
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), {core})


def client(site, cores, number, **options):
    """Start the load client; its report comes on stdout."""
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.overload_client", site.ports.grpc, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    cores.pin(process.pid, number)
    return process


def result(process):
    output, _ = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError(f"the client ended with {process.returncode}")
    return json.loads(output)


def capacity(site, cores, seconds):
    """Requests and tokens per second with as many callers as there is room on the ranks: nobody is refused."""
    report = result(client(site, cores, 2, callers=RANKS * PER_RANK, seconds=seconds, settle=SETTLE_S))
    assert not report["refused"], report["refused"]
    return report["served_per_s"], report["tokens_per_s"]


def overload(site, cores, rate, seconds):
    """Offer `rate` requests per second; the probe has its connection for itself."""
    before, began_at = times_of(site.gateway.pid), time.monotonic()
    load = client(site, cores, 2, rates=rate, seconds=seconds, settle=SETTLE_S)
    probe = client(site, cores, 3, probe_every_ms=20, seconds=seconds, settle=SETTLE_S)
    report = result(load)
    report["probe"] = result(probe)
    ran_s, waited_s = (after - now for after, now in zip(times_of(site.gateway.pid), before, strict=True))
    took_s = time.monotonic() - began_at
    report["gateway"] = {"ran": ran_s / took_s, "waited_for_its_core": waited_s / took_s}
    return report


def times_of(pid):
    """Seconds that the threads of a process ran, and that they could have but their core was busy."""
    ran, waited = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            numbers = (task / "schedstat").read_text().split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran / 1e9, waited / 1e9


def leaks(site):
    """What is still charged somewhere when everything has ended: names and values, none when all is well."""

    def left():
        page = site.scrape()
        families = {family.name.removeprefix("rankgate_"): family for family in text_string_to_metric_families(page)}
        found = {name: sum(sample.value for sample in families[name].samples) for name in QUIET}
        accepted = sum(sample.value for sample in families["requests_accepted"].samples)
        ended = sum(sample.value for sample in families["requests"].samples)
        found["accepted_not_ended"] = accepted - ended
        with grpc.insecure_channel(site.ports.grpc) as channel:
            ranks = GatewayServiceStub(channel).ListRanks(gateway_pb2.ListRanksRequest(), timeout=10).ranks
        found["listed_in_flight"] = sum(rank.in_flight for rank in ranks)
        return {name: value for name, value in found.items() if value}

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), "everything to be given back", timeout_s=10.0)
    return left()


@contextlib.contextmanager
def running(mode, cores, weights=None):
    """A deployment that is ready, on its cores."""
    with deployment(mode, weights) as site:
        site.start()
        cores.pin(site.gateway.pid, 0)
        cores.pin(site.engines[0].pid, 1)
        yield site


def run_mode(mode, cores, options):
    """Capacity, overload and shares of one mode."""
    with running(mode, cores) as site:
        base, tokens = capacity(site, cores, options.capacity_seconds)
        rate = min(options.factor * base, MAX_OFFERED_PER_S)
        report = overload(site, cores, rate, options.seconds)
        report |= {"mode": mode, "capacity_per_s": base, "asked_per_s": rate, "leaks": leaks(site)}
        report["throughput"] = report["tokens_per_s"] / tokens
    report["shares"] = []
    for weights in WEIGHTS[: options.weights]:
        with running(mode, cores, weights) as site:
            share = share_of(site, cores, weights, rate, options.share_seconds)
            share["throughput"] = share.pop("tokens_per_s") / tokens
            report["shares"].append(share | {"leaks": leaks(site)})
    return report


def share_of(site, cores, weights, rate, seconds):
    """Who is served how much when one tenant offers ten times what the other one does."""
    rates = f"{rate * 10 / 11},{rate / 11}"
    report = result(client(site, cores, 2, rates=rates, tenants="big,small", seconds=seconds, settle=SETTLE_S))
    served = report["served_by_tenant"]
    wanted = weights[0] / sum(weights)
    got = served["big"] / max(1, sum(served.values()))
    return {
        "weights": weights,
        "served": served,
        "offered": report["offered_by_tenant"],
        "share_of_big": got,
        "wanted": wanted,
        "largest_deviation": max(abs(got / wanted - 1), abs((1 - got) / (1 - wanted) - 1)),
        "tokens_per_s": report["tokens_per_s"],
    }


def show(report):
    base = report["capacity_per_s"]
    refused = report["refused"]
    total = sum(refused.values())
    hinted = report["refused_with_hint"] / total if total else 1.0
    print(f"== mode {report['mode']}: capacity {base:.1f} requests/s, offered {report['offered_per_s']:.0f} requests/s")
    print(
        f"served       {report['served_per_s']:8.1f} requests/s = {report['served_per_s'] / base:.1%} of the capacity"
    )
    print(f"refused      {total:8} ({', '.join(f'{reason} {count}' for reason, count in refused.items())}), "
          f"{hinted:.1%} with a hint of {_range(report['hint_s'], 's')}")  # fmt: skip
    for name, times in (("TTFT", report["ttft_ms"]), ("end to end", report["e2e_ms"])):
        print(f"{name:12} {_percentiles(times)} of what was admitted")
    print(f"refusals     {_percentiles(report['probe']['refusal_ms'])} on an idle connection, to the trailers")
    print(f"             {_percentiles(report['refusal_ms'])} in the client that makes the load")
    print(f"client       {report['lag_p99_ms']:.1f} ms behind its schedule at p99")
    gateway = report["gateway"]
    print(
        f"gateway      ran {gateway['ran']:.1%} of the time and waited for its core {gateway['waited_for_its_core']:.1%}"
    )
    print(f"left charged {report['leaks'] or 'nothing'}, {report['unfinished']} unfinished")
    for share in report["shares"]:
        print(
            f"weights {share['weights'][0]:g}:{share['weights'][1]:g} "
            f"offered {share['offered']['big']}:{share['offered']['small']} "
            f"served {share['served']['big']}:{share['served']['small']} = {share['share_of_big']:.1%} "
            f"(wanted {share['wanted']:.1%}, off by {share['largest_deviation']:.1%} at most), "
            f"{share['throughput']:.1%} of the capacity, left charged {share['leaks'] or 'nothing'}"
        )
    print(flush=True)


def _percentiles(times):
    return "  ".join(f"{name} {value:8.1f} ms" for name, value in times.items()) if times else "none"


def _range(values, unit):
    return f"{values[0]:.2f} to {values[1]:.2f} {unit}" if values else "nothing"


def missed(report):
    """The targets that this run missed, in words."""
    if report["throughput"] < TARGETS["throughput"]:
        yield f"served {report['throughput']:.1%} of the capacity"
    refusals = report["probe"]["refusal_ms"]
    if refusals and refusals["p99"] > TARGETS["refusal_p99_ms"]:
        yield f"refusals took {refusals['p99']:.1f} ms at p99"
    if report["refused_with_hint"] != sum(report["refused"].values()):
        yield "refusals without a hint"
    if report["leaks"]:
        yield f"left charged: {report['leaks']}"
    for share in report["shares"]:
        if share["largest_deviation"] > TARGETS["share"]:
            yield f"weights {share['weights']}: off by {share['largest_deviation']:.1%}"
        if share["leaks"]:
            yield f"weights {share['weights']}: left charged {share['leaks']}"


def main():
    """Print the tables, then everything as JSON. Exit status 1 when a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=["direct", "queue"], choices=["direct", "queue", "batch"])
    parser.add_argument("--factor", type=float, default=10.0, help="offered load, in capacities")
    parser.add_argument("--seconds", type=float, default=12.0, help="of overload")
    parser.add_argument("--capacity-seconds", type=float, default=8.0)
    parser.add_argument("--share-seconds", type=float, default=9.0, help="of overload by two tenants")
    parser.add_argument(
        "--weights", type=int, default=2, choices=range(len(WEIGHTS) + 1), help="pairs of weights to run"
    )
    parser.add_argument("--json", type=Path, help="write the figures here instead of printing them")
    options = parser.parse_args()
    cores = Cores()
    reports = []
    for mode in options.modes:
        reports.append(run_mode(mode, cores, options))
        show(reports[-1])
    text = json.dumps({"targets": TARGETS, "runs": reports}, indent=1)
    if options.json is not None:
        options.json.write_text(text)
    else:
        print(text)
    faults = [f"{report['mode']}: {fault}" for report in reports for fault in missed(report)]
    for fault in faults:
        print(f"MISSED {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
