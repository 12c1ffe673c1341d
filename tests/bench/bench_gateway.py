"""CPU per token and per request of the whole gateway process on one pinned core, beside a peer's servicer.

Same stub ranks, same client, same bytes, interleaved repeats in one run. The peer (SMG's Rust servicer, the
vLLM engine service over the same ZMQ wire) takes part when `.venv-peers` exists (`make test-peers` makes it).
"""

import argparse
import json
import statistics
import subprocess
import sys

from tests.bench.systems import LOAD_CORE, PEER_PYTHON, ROOT, cpu_s, rss_mb, running

SCENARIOS = {
    "paced": {"step_ms": 20.0, "tokens": 64, "conns": 8, "streams": 32, "total": 1024, "warmup": 256},
    "flood": {"step_ms": 0.0, "tokens": 64, "conns": 8, "streams": 32, "total": 1500, "warmup": 256},
    "flood256": {"step_ms": 0.0, "tokens": 256, "conns": 8, "streams": 32, "total": 500, "warmup": 256},
    "short": {"step_ms": 0.0, "tokens": 1, "conns": 8, "streams": 8, "total": 3000, "warmup": 300},
}
VARIANTS = {
    "smg engine": ("smg", "engine"),
    "grpcio engine": ("grpcio", "engine"),
    "grpcio generate": ("grpcio", "generate"),
    "grpcio many": ("grpcio", "many"),
    "fast engine": ("fast", "engine"),
    "fast generate": ("fast", "generate"),
    "fast many": ("fast", "many"),
}
BASE = "smg engine"


def measure(kind, method, scenario, ranks):
    options = [f"--{key}={scenario[key]}" for key in ("tokens", "conns", "streams", "total", "warmup")]
    with running(kind, ranks=ranks, step_ms=scenario["step_ms"]) as (pid, address):
        client = subprocess.Popen(
            ["taskset", "-c", LOAD_CORE, sys.executable, "-m", "tests.bench.client", address, method, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        began = cpu_s(pid)
        said = []
        for line in client.stderr:
            said.append(line)
            if line.startswith("WARM"):
                began = cpu_s(pid)
        result = json.loads(client.stdout.read() or "{}")
        used = cpu_s(pid) - began
        if client.wait(60) or result.get("errors"):
            raise RuntimeError(f"{kind} {method}: {''.join(said)[-500:]}")
        result["us_per_request"] = used / result["done"] * 1e6
        result["us_per_token"] = result["us_per_request"] / scenario["tokens"]
        result["tokens"] = scenario["tokens"]
        result["rss_mb"] = rss_mb(pid)
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--json", help="write every run's figures to this file")
    options = parser.parse_args()
    variants = dict(VARIANTS)
    if not PEER_PYTHON.exists():
        print("no .venv-peers: the peer is left out (`make test-peers` makes it)")
        del variants[BASE]
    runs = {}
    for name in options.scenario or SCENARIOS:
        for _ in range(options.repeats):
            for label, (kind, method) in variants.items():
                runs.setdefault(name, {}).setdefault(label, []).append(
                    measure(kind, method, SCENARIOS[name], options.ranks)
                )
        show(name, runs[name])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(runs, file, indent=1)


def show(name, by_label):
    unit = "us_per_request" if name == "short" else "us_per_token"
    base = statistics.median(run[unit] for run in by_label[BASE]) if BASE in by_label else None
    for label, results in by_label.items():
        values = sorted(run[unit] for run in results)
        median = statistics.median(values)
        ratio = f"  x{median / base:.2f}" if base else ""
        rate = statistics.median(run["tokens_per_s"] for run in results)
        coalesced = statistics.median(run["done"] * run["tokens"] / max(1, run["messages"]) for run in results)
        ttft = statistics.median(run["ttft_p50_ms"] or 0.0 for run in results)
        print(
            f"{name:6} {label:14} {median:8.2f} {unit} [{values[0]:.2f}-{values[-1]:.2f}]{ratio}"
            f"  {rate:8.0f} tokens/s  {coalesced:.1f} tokens/message  ttft p50 {ttft:.2f} ms  rss {results[-1]['rss_mb']:.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
