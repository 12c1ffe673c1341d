"""A million steps of the core: whether a step costs the same at the end, and whether anything stays behind.

Run `python -m tests.bench.bench_steps` from the repository root; one mode takes under a minute. A step is one call of
`Router.handle`: arrivals (every 20th with a deadline that passes), batches of 16 rows, cancels and ticks, over some
thousand live requests. Ten times in a run everything is ended and what is left is counted. Exit code 1 when the CPU
time of a step (median of blocks of 1000) moved by more than 25 % between the first and the last tenth, or blocks or
memory grew.
"""

import argparse
import gc
import sys
from array import array
from collections import deque
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any, NamedTuple

from gateway.core.effects import AbortOnRank, Dispatch, Effect, RequestAccepted, RequestEnded
from gateway.core.errors import Reason
from gateway.core.events import BatchReceived, RankJoined, RequestArrived, RequestCancelled, Tick
from gateway.core.request import Request, Sequence
from gateway.core.router import Router
from gateway.types import EngineBatch, EngineLoad, Sampling
from tests.support.core import NONCE, make_config, make_info

RANKS = 8
LIVE = 3000
ROWS = 16
MAX_TOKENS = 8
STEP_S = 0.0005
BLOCK = 1000
MODES = ("direct", "queue", "batch")
# Of 20 steps. More arrive than the batches can end; beyond `LIVE` a batch takes an arrival's place.
CYCLE = "aabaabaabacabaaabaat"

MAX_DRIFT = 0.25
MAX_BLOCKS = 400
"""Records of the bounded memories differ a little in size; a leak of one block per thousand requests shows."""
MAX_RSS_MB = 4.0


class Remains(NamedTuple):
    """What is allocated when nothing is live: Python's blocks, resident MiB."""

    blocks: int
    rss_mb: float


class Traffic:
    """A router and just enough of an engine: each batch gives the next rows of a rank a token each."""

    def __init__(self, mode: str) -> None:
        config = make_config(
            RANKS,
            scheduling={"mode": mode},
            observability={"decision_ring": 256},
            predictor={"prefill_ms": "0.03 * total_new_tokens"},
        )
        self.router = Router(config, nonce=NONCE, rng=Random(1).random)
        self.now = 0.0
        self.count = 0
        self._random = Random(2)
        self._rows: list[deque[list[Any]]] = [deque() for _ in range(RANKS)]
        self._aborted: set[str] = set()
        self._live: deque[Request] = deque()
        self._rank = 0
        self._prompts = [bytes(self._random.randrange(1, 512)) for _ in range(64)]
        self._sampling = Sampling(max_tokens=MAX_TOKENS)
        self._tick = Tick()
        for rank in range(RANKS):
            self.router.handle(RankJoined(rank=rank, incarnation=1, info=make_info(kv_capacity_tokens=4_000_000)), 0.0)

    def step(self) -> None:
        """One call of the core."""
        self.count += 1
        self.now += STEP_S
        kind = CYCLE[self.count % len(CYCLE)]
        if kind == "a" and self.router.live_count < LIVE:
            self._arrive()
        elif kind == "c":
            self._cancel()
        elif kind == "t":
            self._run(self.router.handle(self._tick, self.now))
        else:
            self._batch()

    def drain(self) -> Remains:
        """End everything that is live; what is left then."""
        while self.router.live_count:
            self._cancel()
        for rows in self._rows:
            rows.clear()
        self._aborted.clear()
        self._live.clear()
        self._flush()
        self.router.check()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Remains(sys.getallocatedblocks(), pages * 4096 / 2**20)

    def _arrive(self) -> None:
        number = self.count
        arrived = RequestArrived(
            client_key="c",
            request_id=str(number),
            prompt_token_ids=self._prompts[number % 64],
            sampling=self._sampling,
            tenant="ab"[number % 2],
            deadline_at=self.now + 0.05 if number % 20 == 0 else None,
        )
        self._run(self.router.handle(arrived, self.now))

    def _cancel(self) -> None:
        live = self._live
        while live:
            request = live.popleft()
            if not request.is_ended:
                self._run(self.router.handle(RequestCancelled(request.handle, Reason.CANCELLED), self.now))
                return

    def _batch(self) -> None:
        rank = self._rank = (self._rank + 1) % RANKS
        rows, aborted = self._rows[rank], self._aborted
        ids: list[str] = []
        finishes: list[Any] = []
        for _ in range(min(ROWS, len(rows))):
            row = rows.popleft()
            if row[0] in aborted:
                aborted.discard(row[0])
                continue
            row[1] -= 1
            ids.append(row[0])
            finishes.append("" if row[1] else "length")
            if row[1]:
                rows.append(row)
        batch = EngineBatch(
            ids=ids,
            token_ids=[[7]] * len(ids),
            finish=finishes,
            load=EngineLoad(running=len(rows), waiting=0, kv_usage=0.1),
        )
        self._run(self.router.handle(BatchReceived(rank, 1, batch), self.now))
        self._flush()

    def _flush(self) -> None:
        for item in self.router.take_dirty():
            if isinstance(item, Sequence):
                item.take()

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                # As in real engines, the first token comes with the next batch.
                self._rows[effect.rank].appendleft([effect.request.wire_id, MAX_TOKENS])
            elif isinstance(effect, AbortOnRank):
                self._aborted.update(effect.wire_ids)
            elif isinstance(effect, RequestAccepted):
                self._live.append(effect.request)
            elif isinstance(effect, RequestEnded) and len(self._live) > 4 * LIVE:
                self._live = deque(request for request in self._live if not request.is_ended)


def measure(mode: str, steps: int) -> bool:
    """Run one mode and print it; whether all is flat."""
    traffic = Traffic(mode)
    for _ in range(2 * BLOCK):
        traffic.step()
    costs: list[array[float]] = []
    remains: list[Remains] = []
    deepest = 0
    for _ in range(10):
        blocks = array("d")  # a list would itself grow by an object per block of steps
        for _ in range(max(1, steps // 10 // BLOCK)):
            start = process_time()
            for _ in range(BLOCK):
                traffic.step()
            blocks.append((process_time() - start) / BLOCK * 1e6)
            deepest = max(deepest, traffic.router.queue_depth)
        costs.append(blocks)
        remains.append(traffic.drain())
    first, last = median(costs[0]), median(costs[-1])
    drift = last / first - 1
    grown = remains[-1].blocks - remains[0].blocks
    rss = remains[-1].rss_mb - remains[0].rss_mb
    is_flat = abs(drift) <= MAX_DRIFT and grown <= MAX_BLOCKS and rss <= MAX_RSS_MB
    counters = traffic.router.counters
    print(
        f"{mode:<7}{traffic.count:>9} steps, {counters.accepted} requests {dict(counters.ended)}, queue up to {deepest}"
        f"\n       µs/step {first:.1f} -> {last:.1f} ({drift:+.1%}), blocks {remains[0].blocks} -> {remains[-1].blocks}"
        f" ({grown:+d}), RSS {remains[0].rss_mb:.1f} -> {remains[-1].rss_mb:.1f} MiB"
        f" {'ok' if is_flat else 'NOT FLAT'}",
        flush=True,
    )
    return is_flat


def main() -> None:
    """Print a line per mode; exit code 1 when one is not flat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    results = [measure(mode, options.steps) for mode in options.modes]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
