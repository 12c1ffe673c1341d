"""`make bench-peers`: the gateway beside its peers, in one run on one machine. Ratios are what counts.

The server under test has core 0 for itself, ranks and client share core 1; its CPU is the kernel's own count for its
process tree. Writes OUT.json, OUT.txt, OUT.md (tables for the docs) and OUT.svg.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.peers import install, markdown, report
from tests.bench.peers.chart import chart
from tests.bench.peers.collect import Collection
from tests.bench.peers.kinds import PEERS
from tests.bench.peers.process import LOAD_CORE, PeerError
from tests.bench.peers.scenarios import ALL

QUIET_LOAD = 0.7


def names(known: dict[str, object]) -> "type":
    """An argument type: a comma-separated list of known names."""

    def parse(text: str) -> list[str]:
        chosen = text.replace(",", " ").split()
        if unknown := [each for each in chosen if each not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return chosen

    return parse  # type: ignore[return-value]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--scenarios", type=names({**ALL}), default=list(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--peers", type=names({**PEERS}), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench-peers/result"), help="prefix of the files")
    parser.add_argument("--quick", action="store_true", help="fractions of a second each, to see that it works")
    return parser.parse_args()


def main() -> int:
    """Measure, write, print."""
    options = arguments()
    if (os.cpu_count() or 1) < 2:
        print("needs two cores: one for the server under test, one for what loads it", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    try:
        install.compile_client()
    except PeerError as error:
        print(error, file=sys.stderr)
        return 1
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rankgate-bench-peers-") as directory:
        collection = Collection(
            Path(directory), options.scenarios, options.peers, repeats=options.repeats, quick=options.quick
        )
        results = collection.run()
    text = report.table(results)
    if load > QUIET_LOAD:
        text += f"\nnot a quiet machine: load average {load:.1f} at the start; the costs are inflated, the ratios rough"
    print(text)
    document = results.document() | {
        "repeats": options.repeats,
        "took_s": time.monotonic() - began,
        "machine": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": f"{platform.python_version()}, {platform.python_compiler()}",
            "load_at_start": load,
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1))
    options.out.with_suffix(".txt").write_text(text + "\n")
    options.out.with_suffix(".md").write_text(markdown.tables(results))
    options.out.with_suffix(".svg").write_text(chart(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
