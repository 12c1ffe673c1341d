"""Thousands of connections, ten times the load on top, and a reader that is far too slow: what is left afterwards.

Run `python -m tests.bench.bench_connections` from the repository root; about a minute and a half. Gateway, ranks and
clients are processes of their own, as in `bench_overload`. Refusals are timed by the gateway itself
(`rankgate_rejection_duration_seconds`, from the handler's start to the status that was sent) and by a client on a
connection of its own. The slow reader runs beside 200 streams, and those are compared with themselves without it.

Processes run with one arena of glibc's allocator: with its usual eight per core, thousands of connections that come and
go fragment each of them for a while, of a bare gRPC server too, and that can't be told from a leak within a minute.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.bench_overload import (
    MAX_OFFERED_PER_S,
    RANKS,
    Cores,
    capacity,
    client,
    deployment,
    leaks,
    overload,
    result,
)
from tests.bench.systems import rss_mb
from tests.support.deployment import Deployment
from tests.support.processes import ROOT, WAIT_S, wait_until

TARGETS = {"refusal_p99_s": 0.05, "rss_growth": 1.05, "throughput": 0.95, "beside_slow": 0.95}
FAST_STREAMS = 200
SLOW_BYTES_PER_S = 12
"""About a token, with what is around it."""
SLOW_LIMITS = {"max_stream_buffer_bytes": 256}
"""A step takes 40 ms, and a backlog is measured every 128 tokens: the limit is met within some ten seconds."""
SLOW_SECONDS = 16.0
FILES_SLACK = 4
THREADS_SLACK = 8
"""The gRPC library starts some when there is much to do."""
ROUNDS = 3


class Holder:
    """Connections that are held open by a process of their own."""

    def __init__(self, address, cores, **options):
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.connection_client", address, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        cores.pin(self._process.pid, 3)

    def said(self, word):
        """The facts of its next line, which begins with the word."""
        line = self._process.stdout.readline()
        if not line.startswith(word):
            raise RuntimeError(f"expected {word}, the client said {line!r}")
        return json.loads(line.removeprefix(word))

    def end(self):
        self._process.stdin.close()
        try:
            return self.said("CLOSED")
        finally:
            self._process.wait(WAIT_S)

    def kill(self):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT_S)


@contextlib.contextmanager
def held(site, cores, **options):
    holder = Holder(site.ports.grpc, cores, **options)
    try:
        yield holder
    finally:
        holder.kill()


def state(site):
    """What the gateway's process holds."""
    pid = site.gateway.pid
    return {
        "rss_mb": round(rss_mb(pid), 1),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        "streams": site.metric("rankgate_client_streams"),
        "connections": site.metric("rankgate_client_connections"),
    }


def settled(site, files):
    """The state once everything that was open is closed, or after a while."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: state(site)["files"] <= files + FILES_SLACK, "files to be closed", timeout_s=15.0)
    time.sleep(1.0)
    return state(site)


def rejections(site):
    """Cumulative counts of the gateway's own histogram by upper bound."""
    for family in text_string_to_metric_families(site.scrape()):
        if family.name == "rankgate_rejection_duration_seconds":
            buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
            return {float(sample.labels["le"]): sample.value for sample in buckets}
    raise RuntimeError("no histogram of rejections")


def p99(before, after):
    """The upper bound of the bucket with the 99th percentile, and the number of refusals."""
    counts = {bound: count - before[bound] for bound, count in after.items()}
    total = counts[float("inf")]
    return min(bound for bound, count in sorted(counts.items()) if count >= 0.99 * total), int(total)


def run_connections(cores, options):
    """Capacity, connections, overload on top, everything closed; and once more without load."""
    with deployment("direct") as site:
        site.start()
        cores.pin(site.gateway.pid, 0)
        cores.pin(site.engines[0].pid, 1)
        base, tokens = capacity(site, cores, options.seconds / 2)
        report = {"capacity_per_s": base, "before": settled(site, 0)}
        with held(site, cores, idle=options.connections - options.streams, streams=options.streams) as holder:
            report["opened"] = holder.said("OPEN")
            report["open"] = state(site)
            before = rejections(site)
            loaded = overload(site, cores, min(options.factor * base, MAX_OFFERED_PER_S), options.seconds)
            report["refusal_p99_s"], report["refusals"] = p99(before, rejections(site))
            report["loaded"] = state(site)
            report["closed"] = holder.end()
        report["overload"] = {
            name: loaded[name] for name in ("offered_per_s", "served_per_s", "refused", "hint_s", "gateway")
        }
        report["probe_ms"] = loaded["probe"]["refusal_ms"]
        report["throughput"] = loaded["tokens_per_s"] / tokens
        report["leaks"] = leaks(site)
        report["after"] = settled(site, report["before"]["files"])
        # The allocator needs a round or two until what one leaves is enough for the next.
        report["after_more"] = [again(site, cores, options, report["before"]["files"]) for _ in range(ROUNDS)]
    return report


def again(site, cores, options, files):
    """Open and close as many connections once more, without load."""
    with held(site, cores, idle=options.connections - options.streams, streams=options.streams) as holder:
        holder.said("OPEN")
        holder.end()
    return settled(site, files)


def fast(site, cores, seconds):
    report = result(client(site, cores, 2, callers=FAST_STREAMS, seconds=seconds, settle=1.5))
    return {"tokens_per_s": report["tokens_per_s"], "ttft_ms": report["ttft_ms"], "e2e_ms": report["e2e_ms"]}


def run_slow_reader(cores, options):
    """200 streams alone, with the slow one, and alone again."""
    stub = {"scheduler": {"max_active": FAST_STREAMS}}
    with Deployment("vllm", ranks=RANKS, step_ms=40.0, stub=stub, limits=SLOW_LIMITS) as site:
        site.start()
        cores.pin(site.gateway.pid, 0)
        cores.pin(site.engines[0].pid, 1)
        runs = {"warm_up": fast(site, cores, options.seconds / 2), "alone": fast(site, cores, options.seconds)}
        before = state(site)["rss_mb"]
        with held(site, cores, slow=SLOW_BYTES_PER_S, seconds=SLOW_SECONDS) as holder:
            runs["beside"] = fast(site, cores, options.seconds)
            ended = holder.said("ENDED")
        runs["alone_again"] = fast(site, cores, options.seconds)
        outcomes = [e["outcome"] for e in site.gateway.events("request_ended") if e["request_id"] == "slow"]
        return {
            "runs": runs,
            "slow": ended | {"outcomes": outcomes},
            "rss_mb": [before, state(site)["rss_mb"]],
            "leaks": leaks(site),
        }


def missed(report):
    """What did not come out as it should."""
    faults = []
    if (connections := report.get("connections")) is not None:
        before, last = connections["before"], connections["after_more"]
        checks = {
            "connections were refused or lost": connections["opened"]["refused"] or connections["closed"]["lost"],
            "streams ended": connections["closed"]["ended"],
            "refusal p99": connections["refusal_p99_s"] > TARGETS["refusal_p99_s"],
            "throughput": connections["throughput"] < TARGETS["throughput"],
            "files": last[-1]["files"] > before["files"] + FILES_SLACK,
            "threads": last[-1]["threads"] > before["threads"] + THREADS_SLACK,
            "streams": last[-1]["streams"] or last[-1]["connections"],
            "memory grows": last[-1]["rss_mb"] > TARGETS["rss_growth"] * last[-2]["rss_mb"],
            "charges": connections["leaks"],
        }
        faults += [name for name, value in checks.items() if value]
    if (slow := report.get("slow_reader")) is not None:
        runs = slow["runs"]
        alone = min(runs[name]["tokens_per_s"] for name in ("alone", "alone_again"))
        checks = {
            "others slowed down": runs["beside"]["tokens_per_s"] < TARGETS["beside_slow"] * alone,
            "the slow reader was not ended": slow["slow"]["outcomes"] != ["SLOW_READER"],
            "nor told": "reader" not in slow["slow"]["trailers"],
            "charges beside the slow reader": slow["leaks"],
        }
        faults += [name for name, value in checks.items() if value]
    return faults


def show(report):
    if (found := report.get("connections")) is not None:
        print(f"== {found['opened']['idle']} idle connections and {found['opened']['streams']} with an open stream, "
              f"made in {found['opened']['took_s']:.1f} s")  # fmt: skip
        load = found["overload"]
        print(f"offered {load['offered_per_s']:.0f}/s, capacity {found['capacity_per_s']:.1f}/s, "
              f"served {load['served_per_s']:.1f}/s, throughput {found['throughput']:.1%}")  # fmt: skip
        gateway = load["gateway"]
        print(
            f"gateway      ran {gateway['ran']:.0%} of the time, waited for its core {gateway['waited_for_its_core']:.0%}"
        )
        print(f"refusals     {found['refusals']}, p99 at most {found['refusal_p99_s'] * 1e3:g} ms in the gateway, "
              f"{found['probe_ms']} ms to a client; hints {load['hint_s']} s")  # fmt: skip
        for name in ("before", "open", "loaded", "after"):
            print(f"{name:12} {found[name]}")
        for each in found["after_more"]:
            print(f"{'once more':12} {each}")
        print(f"left charged {found['leaks'] or 'nothing'}")
    if (found := report.get("slow_reader")) is not None:
        print(f"== {FAST_STREAMS} streams and a reader of {SLOW_BYTES_PER_S} bytes/s")
        for name, run in found["runs"].items():
            print(f"{name:12} {run['tokens_per_s']:.0f} tokens/s, TTFT {run['ttft_ms']}, end to end {run['e2e_ms']}")
        print(
            f"the slow one {found['slow']['outcomes']} after {found['slow']['data_bytes']} bytes; RSS {found['rss_mb']} MB"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=5000, help="idle ones and those with a stream together")
    parser.add_argument("--streams", type=int, default=300, help="of these, real channels with an open stream")
    parser.add_argument("--factor", type=float, default=10.0, help="offered load, in capacities")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of overload, and of each run beside the slow reader"
    )
    parser.add_argument("--only", choices=["connections", "slow_reader"], help="one of the two parts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cores, parts = Cores(), {"connections": run_connections, "slow_reader": run_slow_reader}
    report = {name: run(cores, options) for name, run in parts.items() if options.only in (None, name)}
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps({"targets": TARGETS, **report}, indent=1))
    faults = missed(report)
    for fault in faults:
        print(f"MISSED {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
