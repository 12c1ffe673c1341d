"""Runs targets over damaged frames in blocks, each from a seed of its own, so that any block can be run again alone."""

import faulthandler
import time
from collections.abc import Iterable
from pathlib import Path
from resource import getpagesize
from typing import Any, NamedTuple

from tests.fuzz import targets_edge, targets_h2, targets_requests, targets_wire
from tests.fuzz.mutator import Frame, Mutator
from tests.fuzz.target import Check, Target, show

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (targets_wire, targets_requests, targets_edge, targets_h2)
    for target in module.TARGETS
}
BLOCK_FRAMES = 1_000
MAX_FRAME_S = 1.0
"""CPU time that one frame may take; the slowest that is known takes some milliseconds."""
HANG_S = 60.0
"""A block that takes longer ends the process with a traceback of where it is."""
_KEPT_FAILURES = 5


class Failure(NamedTuple):
    """A broken promise and the frame that broke it."""

    target: str
    block: int
    error: str
    frame: str


class Tally:
    """What one process did."""

    def __init__(self) -> None:
        self.frames: dict[str, int] = dict.fromkeys(TARGETS, 0)
        self.seconds: dict[str, float] = dict.fromkeys(TARGETS, 0.0)
        self.slowest: dict[str, tuple[float, str]] = dict.fromkeys(TARGETS, (0.0, ""))
        self.failures: list[Failure] = []
        self.rss_mb: list[float] = []


class Blocks:
    """One target in this process."""

    def __init__(self, target: Target, seed: str) -> None:
        self._target = target
        self._seed = seed
        self._corpus = list(target.corpus())
        self._others = [part for frame in self._corpus for part in frame]
        self._run: Check = target.make()

    def run(self, block: int, frames: int, tally: Tally) -> None:
        """Run one block."""
        target, run = self._target, self._run
        mutator = Mutator(f"{self._seed}/{target.name}/{block}", self._others)
        choice, corpus, clock = mutator.source.choice, self._corpus, time.thread_time
        began_at = clock()
        slowest, slowest_frame = tally.slowest[target.name][0], None
        for _ in range(frames):
            frame = target.damage(mutator, choice(corpus))
            sent = list(frame)
            at = clock()
            try:
                run(frame)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the find
                self._failed(tally, block, f"{type(error).__name__}: {error}"[:300], sent)
            took_s = clock() - at
            if took_s > slowest:
                slowest, slowest_frame = took_s, sent
        if slowest_frame is not None:
            tally.slowest[target.name] = (slowest, show(slowest_frame)[:400])
            if slowest > MAX_FRAME_S:
                self._failed(tally, block, f"a frame took {slowest:.2f} s", slowest_frame)
        tally.frames[target.name] += frames
        tally.seconds[target.name] += clock() - began_at

    def _failed(self, tally: Tally, block: int, error: str, frame: Frame) -> None:
        if sum(failure.target == self._target.name for failure in tally.failures) < _KEPT_FAILURES:
            tally.failures.append(Failure(self._target.name, block, error, show(frame)))


def plan(frames: int, names: Iterable[str]) -> list[tuple[str, int, int]]:
    """(target, block, frames in it), the targets mixed."""
    targets = [TARGETS[name] for name in names]
    whole = sum(target.share for target in targets)
    blocks = []
    for target in targets:
        wanted = max(1, round(frames * target.share / whole))
        count = -(-wanted // BLOCK_FRAMES)
        for block in range(count):
            size = min(BLOCK_FRAMES, wanted - block * BLOCK_FRAMES)
            blocks.append((block / count, target.name, block, size))
    return [(name, block, size) for _, name, block, size in sorted(blocks)]


def work(blocks: list[tuple[str, int, int]], seed: str) -> Tally:
    """Run blocks in this process."""
    tally, open_targets = Tally(), {}
    every = max(1, len(blocks) // 10)
    for number, (name, block, size) in enumerate(blocks):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if name not in open_targets:
            open_targets[name] = Blocks(TARGETS[name], seed)
        open_targets[name].run(block, size, tally)
        if (number + 1) % every == 0:
            tally.rss_mb.append(rss_mb())
    faulthandler.cancel_dump_traceback_later()
    return tally


def rss_mb() -> float:
    """This process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize() / 1e6


def merge(tallies: Iterable[Tally]) -> dict[str, Any]:
    """A report of all processes."""
    tallies = list(tallies)
    report: dict[str, Any] = {"targets": {}, "failures": [f._asdict() for tally in tallies for f in tally.failures]}
    for name in TARGETS:
        frames = sum(tally.frames[name] for tally in tallies)
        if frames:
            slowest, frame = max(tally.slowest[name] for tally in tallies)
            seconds = sum(tally.seconds[name] for tally in tallies)
            report["targets"][name] = {
                "frames": frames,
                "us_per_frame": round(seconds / frames * 1e6, 1),
                "slowest_ms": round(slowest * 1e3, 2),
                "slowest_frame": frame,
            }
    report["frames"] = sum(entry["frames"] for entry in report["targets"].values())
    report["rss_mb"] = [[round(value, 1) for value in tally.rss_mb] for tally in tallies]
    return report
