"""`python -m tests.fuzz`: damaged frames for every decoder, until so many have been tried.

The same seed gives the same frames, whatever the number of jobs. A failure is printed with its frame;
`--target NAME --replay HEX` runs that frame alone.
"""

import argparse
import json
import multiprocessing
import sys
import time

from tests.fuzz.runner import TARGETS, merge, plan, work
from tests.fuzz.target import unshow

MAX_GROWTH_MB = 32.0
"""Of a process, from a fifth of its way to its end. Codecs keep encodings of numbers, up to a bound."""


def main() -> int:
    options = arguments()
    if options.replay is not None:
        (name,) = options.target
        TARGETS[name].make()(unshow(options.replay))
        print(f"{name}: no failure")
        return 0
    began_at = time.monotonic()
    blocks = plan(options.frames, options.target)
    shares = [(blocks[job :: options.jobs], options.seed) for job in range(options.jobs)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        report = merge(pool.starmap(work, shares, chunksize=1))
    report["seconds"] = round(time.monotonic() - began_at, 1)
    show(report)
    if options.json:
        print(json.dumps(report, indent=1))
    return 1 if report["failures"] or growth(report) > MAX_GROWTH_MB else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=200_000, help="of all targets together")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", default="1", help="any text")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="all of them unless named")
    parser.add_argument("--replay", help="one frame of a failure; needs one --target")
    parser.add_argument("--json", action="store_true", help="print the whole report as well")
    return parser.parse_args()


def growth(report: dict) -> float:
    """The largest growth of a process's memory once it had tried every target."""
    return max((max(values[-3:]) - max(values[:2]) for values in report["rss_mb"] if len(values) >= 5), default=0.0)


def show(report: dict) -> None:
    print(f"{'target':22} {'frames':>10} {'us/frame':>9} {'slowest ms':>11}")
    for name, entry in report["targets"].items():
        print(f"{name:22} {entry['frames']:>10} {entry['us_per_frame']:>9} {entry['slowest_ms']:>11}")
    print(
        f"{report['frames']} frames in {report['seconds']} s, {len(report['failures'])} failures, memory {report['rss_mb']} MB"
    )
    for failure in report["failures"]:
        print(f"FAILED {failure['target']} (block {failure['block']}): {failure['error']}\n  {failure['frame'][:2000]}")


if __name__ == "__main__":
    sys.exit(main())
