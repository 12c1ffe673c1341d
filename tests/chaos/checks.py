"""What must hold when everything is at rest again: the global postcondition of a deployment of processes."""

import asyncio
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from engine_stub.control_client import ask
from gateway.v1 import gateway_pb2
from tests.chaos.book import OK, Book
from tests.chaos.clients import DEFAULT_DEADLINE_S, GRACE_S
from tests.chaos.site import Site
from tests.support.processes import WAIT_S

REST_S = 40.0
"""How long a site may take to come to rest."""
MAX_GROWTH = 0.05
MAX_BOUNCE = 0.25
MIN_JUDGED_S = 80.0
"""Over less time than that the allocator's steps say nothing about growth."""
SPARE_DESCRIPTORS = 2
"""The gRPC library opens a few once, whenever it first needs them."""
MUST_BE_ZERO = (
    "rankgate_live_requests",
    "rankgate_rank_requests_in_flight",
    "rankgate_rank_requests_without_token",
    "rankgate_rank_queued_prompt_tokens",
    "rankgate_rank_context_tokens",
    "rankgate_queue_depth",
    "rankgate_rank_batches_in_flight",
    "rankgate_rank_send_blocked",
    "rankgate_double_releases_total",
    "rankgate_log_lines_lost_total",
    "rankgate_misattributed_rows_total",
)
LOG_DELAY_S = 0.2
"""Terminal lines leave some time after their request."""
PROVOKED = frozenset({"config_kept"})
"""Errors that the log should hold: a plan breaks the configuration file."""


class Baseline(msgspec.Struct, frozen=True):
    """The gateway before there were clients."""

    descriptors: int
    tasks: list[str]


class Memory:
    """Samples of the gateway's memory while the load runs."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    async def watch(self, site: Site, began_at: float) -> None:
        """Sample until cancelled."""
        while True:
            self.samples.append((time.monotonic() - began_at, site.rss_bytes()))
            await asyncio.sleep(0.5)

    def growth(self, warm_s: float) -> tuple[int, int, int] | None:
        """Bytes: the floors of the first fifth after the warm-up and of the last one, and the peak; None without enough samples.

        The floor is the lower quartile. A burst's memory comes back within some twenty seconds, which a median would take
        for growth where bursts fall into the last fifth; what is not given back raises the floor.
        """
        warm = [size for at_s, size in self.samples if at_s >= warm_s]
        share = len(warm) // 5
        if share < 3:
            return None
        return _floor(warm[:share]), _floor(warm[-share:]), max(warm)


def _floor(sizes: list[int]) -> int:
    return round(statistics.quantiles(sizes, n=4)[0])


async def baseline(site: Site) -> Baseline:
    """Call it without clients."""
    return Baseline(site.descriptors(), await asyncio.to_thread(site.tasks))


async def at_rest(site: Site, before: Baseline) -> list[str]:
    """Wait until nothing is left of the load; what is left after `REST_S`, one line each."""
    deadline = time.monotonic() + REST_S
    while problems := await _unrest(site, before):
        if time.monotonic() > deadline or not site.gateway.is_running:
            break
        await asyncio.sleep(0.25)
    return problems


async def _unrest(site: Site, before: Baseline) -> list[str]:
    if not site.gateway.is_running:
        return [f"the gateway has exited: {site.gateway.log[-2000:]}"]
    problems = []
    gc.collect()  # this process's own channels keep their connections until they are collected
    for rank in await site.list_ranks():
        if rank.state != gateway_pb2.RANK_STATE_READY:
            problems.append(f"rank {rank.rank} is {gateway_pb2.RankState.Name(rank.state)}")
        if rank.in_flight:
            problems.append(f"rank {rank.rank} is charged with {rank.in_flight}")
    metrics = await asyncio.to_thread(site.metrics)
    problems += [f"{name} is {metrics[name]:g}" for name in MUST_BE_ZERO if metrics.get(name)]
    accepted, ended = metrics["rankgate_requests_accepted_total"], metrics.get("rankgate_requests_total", 0)
    if accepted != ended:
        problems.append(f"{accepted:g} accepted and {ended:g} ended")
    for rank_process in site.members:
        problems += await asyncio.to_thread(_engine_unrest, rank_process.number, rank_process.process)
    descriptors = site.descriptors()
    if descriptors > before.descriptors + SPARE_DESCRIPTORS:
        problems.append(f"{descriptors} open descriptors, {before.descriptors} before")
    extra = Counter(await asyncio.to_thread(site.tasks)) - Counter(before.tasks)
    if extra:
        problems.append(f"tasks left: {dict(extra)}")
    return problems


def _engine_unrest(number: int, process: Any) -> list[str]:
    if not process.is_running:
        return [f"the process of rank {number} has ended by itself: {process.log[-1000:]}"]
    reply = ask(process.control, {"op": "state", "rank": 0, "set": {}}, WAIT_S)
    if not reply["ok"]:
        return [f"rank {number}: {reply['error']}"]
    (state,) = reply["ranks"]
    found = {"live": state["live"], "kv blocks": state["kv_blocks"]["used"], "bad inputs": state["bad_inputs"]["count"]}
    if state["phase"] != "serving" or state["fate"] != "alive":
        found["phase"] = f"{state['phase']}, {state['fate']}"
    if found["bad inputs"]:
        found["latest bad inputs"] = state["bad_inputs"]["latest"]
    return [f"rank {number}, {name}: {value}" for name, value in found.items() if value]


def log_lines(site: Site) -> Iterator[dict[str, Any]]:
    """The gateway's log, line by line."""
    with site.gateway.log_path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def compare_with_log(site: Site, book: Book) -> list[str]:
    """One terminal line per accepted request, in time, and what the client saw of it."""
    problems: list[str] = []
    lines: dict[str, dict[str, Any]] = {}
    for line in log_lines(site):
        if line["event"] == "request_ended":
            name = line["request_id"]
            if name in lines:
                problems.append(f"{name} has two terminal lines")
            lines[name] = line
        elif line["level"] in ("error", "critical") and line["event"] not in PROVOKED:
            problems.append(f"the gateway logged: {json.dumps(line)[:600]}")
    for name, line in lines.items():
        seen = book.requests.get(name)
        if seen is None:
            continue
        limit_s = (seen.limit_s or DEFAULT_DEADLINE_S) + GRACE_S
        if line["e2e_ms"] > limit_s * 1e3:
            problems.append(f"{name} lived for {line['e2e_ms'] / 1e3:.2f} s, its limit was {limit_s:g} s")
    for name, seen in book.requests.items():
        line = lines.get(name, {})
        problems += _compare(name, seen.outcome, seen.tokens, line.get("outcome"), line.get("completion_tokens", 0))
    return problems


def _compare(name: str, seen: str, tokens: int, logged: str | None, generated: int) -> list[str]:
    """A client may see less than happened, never more."""
    if logged is None:
        return [f"{name}: {tokens} tokens and {seen}, but no terminal line"] if tokens or seen == OK else []
    if seen == OK and logged != "ok":
        return [f"{name}: OK at the client, {logged} in the log"]
    if tokens > generated:
        return [f"{name}: {tokens} tokens at the client, {generated} in the log"]
    if logged == "ok" and seen == OK and tokens != generated:
        return [f"{name}: complete with {tokens} tokens at the client and {generated} in the log"]
    return []


def memory_growth(memory: Memory, warm_s: float) -> tuple[float | None, list[str]]:
    """Growth as a share, and the problem if it is too much."""
    sizes = memory.growth(warm_s)
    if sizes is None:
        return None, []
    first, last, peak = sizes
    growth = last / first - 1
    if memory.samples[-1][0] - warm_s < MIN_JUDGED_S:
        return growth, []
    problems = []
    if growth > MAX_GROWTH:
        problems.append(f"the gateway grew by {growth:.1%} after its warm-up: {first >> 20} to {last >> 20} MiB")
    if peak > first * (1 + MAX_BOUNCE):
        problems.append(f"the gateway had {peak >> 20} MiB at one time, {first >> 20} after its warm-up")
    return growth, problems
