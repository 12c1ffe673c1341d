"""`python -m tests.chaos --seed 1 --minutes 5`: a deployment of processes under load while things go wrong.

Exit status 0: nothing that was promised was broken; 1: the report says what was, and how to run it again.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from tests.chaos import run
from tests.chaos.plan import Kind
from tests.chaos.report import SHOWN
from tests.chaos.scenarios import SCENARIOS

T = TypeVar("T")
EXTRA_S = 150.0
"""What a run may take beyond its load, before it is broken off."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="everything random follows from it")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the load")
    parser.add_argument("--protocol", choices=run.PROTOCOLS, help="engine wire; default: drawn from the seed")
    parser.add_argument("--mode", choices=run.MODES, help="scheduling mode; default: drawn from the seed")
    parser.add_argument("--transport", choices=run.TRANSPORTS, help="gRPC server; default: drawn from the seed")
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second, bursts not counted")
    parser.add_argument("--gap", type=float, default=1.8, help="mean seconds between faults")
    parser.add_argument("--faults", help=f"only these, comma separated; '': none: {', '.join(Kind)}")
    parser.add_argument("--scenario", choices=SCENARIOS, help="instead: one loss of one of four ranks, closely")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: build/chaos-SEED.json")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        return _scenario(options) if options.scenario is not None else _chaos(options)
    except TimeoutError:
        print("FAILED     broken off: something took far longer than it may")
    except AssertionError as error:
        print(f"FAILED     {error}")
    return 1


def _chaos(options: argparse.Namespace) -> int:
    kinds = frozenset(Kind)
    if options.faults is not None:
        kinds = frozenset(map(Kind, filter(None, options.faults.split(","))))
    settings = run.Options(
        seed=options.seed,
        duration_s=options.minutes * 60,
        protocol=options.protocol,
        mode=options.mode,
        transport=options.transport,
        ranks=options.ranks,
        rate=options.rate,
        gap_s=options.gap,
        kinds=kinds,
    )
    result = _bounded(run.chaos(settings), settings.duration_s + EXTRA_S)
    out = options.out or Path("build") / f"chaos-{options.seed}.json"
    run.write(result, out)
    print(run.text(result))
    print(f"details    {out}")
    return 1 if result["violations"] else 0


def _scenario(options: argparse.Namespace) -> int:
    protocol = options.protocol or run.PROTOCOLS[0]
    stage = _bounded(SCENARIOS[options.scenario](protocol), EXTRA_S)
    print(f"{options.scenario}, {protocol}")
    for key, value in stage.figures.items():
        print(f"  {key:16} {value}")
    for problem in stage.problems[:SHOWN]:
        print(f"  FAILED: {problem}")
    return 1 if stage.problems else 0


def _bounded(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Run it for `limit_s` at most. However it ends, SIGTERM included, it ends the processes that it started."""

    async def bounded() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with asyncio.timeout(limit_s):
            return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


if __name__ == "__main__":
    sys.exit(main())
