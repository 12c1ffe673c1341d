"""One run: a site, a load, a plan, and the verdict."""

import asyncio
import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gateway.v1 import gateway_pb2
from tests.chaos import checks
from tests.chaos.book import OK, Book
from tests.chaos.clients import DEFAULT_DEADLINE_S, Clients
from tests.chaos.connection import Connection
from tests.chaos.faults import Injector
from tests.chaos.plan import Fault, Kind, Settings, choose, make_plan
from tests.chaos.report import fault_counts, percentiles, text
from tests.chaos.site import Site
from tests.chaos.traffic import Job, Traffic

__all__ = ["MODES", "PROTOCOLS", "TRANSPORTS", "Options", "chaos", "text", "write"]

PROTOCOLS = ("tokenspeed", "vllm")
MODES = ("direct", "queue", "batch")
TRANSPORTS = ("grpcio", "fast")
STEP_MS = 15.0
WARM_S = 60.0
"""Of the memory, which bursts and slow readers stretch at first; a third of shorter runs."""
SILENCE_S = 2.0
BUFFER_BYTES = 1024
"""More than the longest usual answer has: only who stops reading exceeds it."""
ROOM = 300
"""Sequences that the gateway takes at a time: bursts run into it."""
MAX_LINES = 5000
"""Of the gateway's log that the JSON keeps; terminal lines of requests not counted."""
SHOWN_METRICS = (
    "reroutes", "resumes", "late_rows", "orphan_rows", "lossy_frames", "lost_tokens", "duplicated_tokens",
    "stale_events", "double_ends", "repeated_aborts", "deadlines_expired", "audit_findings",
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is. None: drawn from the seed."""

    seed: int
    duration_s: float
    protocol: str | None = None
    mode: str | None = None
    transport: str | None = None
    ranks: int = 6
    rate: float = 200.0
    gap_s: float = 1.8
    """Mean time between faults."""
    kinds: frozenset[Kind] = frozenset(Kind)


def gateway_sections(mode: str) -> dict[str, Any]:
    """The gateway's configuration, beside what every deployment has."""
    sections: dict[str, Any] = {
        "scheduling": {"mode": mode},
        "admission": {"max_in_flight": ROOM},
        "limits": {"default_deadline_s": DEFAULT_DEADLINE_S, "max_stream_buffer_bytes": BUFFER_BYTES},
        "failure": {"silence": {"after_s": SILENCE_S, "quiet_s": 0.5}, "eject": {"base_s": 0.5, "max_s": 2.0}},
    }
    if mode == "batch":
        sections["scheduling"]["batch"] = {"max_requests": 8, "window_ms": 5}
    return sections


async def chaos(options: Options) -> dict[str, Any]:
    """Run it, and say what happened. Raises only when the site doesn't even start."""
    options = _complete(options)
    protocol, mode, transport = options.protocol, options.mode, options.transport
    assert protocol is not None
    assert mode is not None
    assert transport is not None
    settings = Settings(
        duration_s=options.duration_s,
        protocol=protocol,
        ranks=options.ranks,
        silence_s=SILENCE_S,
        mean_gap_s=options.gap_s,
        kinds=options.kinds,
    )
    plan = make_plan(options.seed, settings)
    began_at = time.monotonic()
    async with Site(protocol, options.ranks, step_ms=STEP_MS, transport=transport, **gateway_sections(mode)) as site:
        before = await checks.baseline(site)
        book = Book()
        memory = checks.Memory()
        traffic = partial(Traffic, options.seed, ranks=options.ranks, most_logprobs=2 if protocol == "vllm" else 0)
        clients = Clients(book, site.ports.grpc, traffic, connections=settings.connections, rate=options.rate)
        await clients.open()
        injector = Injector(site, clients)
        load_s = await _load(site, book, memory, clients, injector, plan, options.duration_s)
        problems = await _every_rank_serves(site, clients)
        problems += await checks.at_rest(site, before)
        await asyncio.sleep(checks.LOG_DELAY_S)
        problems += await asyncio.to_thread(checks.compare_with_log, site, book)
        growth, too_much = checks.memory_growth(memory, min(WARM_S, options.duration_s / 3))
        metrics = await asyncio.to_thread(site.metrics) if site.gateway.is_running else {}
        log = [line for line in checks.log_lines(site) if line["event"] != "request_ended"]
        problems += too_much + _unexpected_loss(book, plan)
    violations = book.violations + problems
    return {
        "seed": options.seed,
        "protocol": protocol,
        "mode": mode,
        "transport": transport,
        "ranks": options.ranks,
        "load_s": round(load_s, 3),
        "wall_s": round(time.monotonic() - began_at, 3),
        "requests": len(book.requests),
        "tokens": book.tokens,
        "retried": book.retried,
        "outcomes": dict(book.outcomes.most_common()),
        "faults": fault_counts(injector.done),
        "latency": {name: percentiles(getattr(book, name)) for name in ("first_ms", "total_ms", "gaps_ms")},
        "memory_growth": growth,
        "memory_mib": [[round(at_s, 1), size >> 20] for at_s, size in memory.samples],
        "gateway": {name: metrics.get(f"rankgate_{name}_total", 0) for name in SHOWN_METRICS},
        "violation_count": book.violation_count + len(problems),
        "violations": violations[:500],
        "replay": _replay(options),
        "log": log[-MAX_LINES:],
        "schedule": msgspec.to_builtins(sorted(injector.done, key=lambda done: done.began_s)),
    }


def write(result: dict[str, Any], path: Path) -> None:
    """The whole result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))


async def _load(
    site: Site,
    book: Book,
    memory: checks.Memory,
    clients: Clients,
    injector: Injector,
    plan: list[Fault],
    duration_s: float,
) -> float:
    """Load and faults together; how long the load lasted."""
    # The client's own pauses would count as the gateway's latency.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)
    book.began_at = began_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(memory.watch(site, began_at))
        loading = group.create_task(clients.run())
        breaking = group.create_task(injector.run(plan, began_at))
        await asyncio.sleep(duration_s)
        clients.stop()
        watching.cancel()
        load_s = time.monotonic() - began_at
        await asyncio.gather(loading, breaking)
    await clients.close()
    gc.unfreeze()
    return load_s


async def _every_rank_serves(site: Site, clients: Clients) -> list[str]:
    """Whatever happened to it: every rank is back and answers."""
    try:
        await site.all_ready()
    except AssertionError as error:
        return [str(error)]
    connection = Connection(site.ports.grpc)
    problems = []
    for rank in range(site.ranks):
        sampling = gateway_pb2.Sampling(max_tokens=3, temperature=0.0)
        request = gateway_pb2.GenerateRequest(
            request_id=f"last-{rank}", prompt_token_ids=[rank + 1, 2, 3], sampling=sampling, data_parallel_rank=rank
        )
        await clients.call(connection, Job(request=request))
        outcome = clients.book.requests[request.request_id].outcome
        if outcome != OK:
            problems.append(f"rank {rank} is READY and answers with {outcome}")
    await connection.close()
    return problems


def _unexpected_loss(book: Book, plan: list[Fault]) -> list[str]:
    """Nobody loses data while ranks send what they should."""
    losing = {Kind.REPLACED, Kind.MISCOUNT}
    if book.outcomes["DATA_LOSS"] and not any(fault.kind in losing for fault in plan):
        return [f"{book.outcomes['DATA_LOSS']} requests ended with DATA_LOSS, and no fault explains it"]
    return []


def _complete(options: Options) -> Options:
    """With what the seed draws."""
    drawn = choose(options.seed, PROTOCOLS, MODES, TRANSPORTS)
    given = (options.protocol, options.mode, options.transport)
    protocol, mode, transport = (wanted or own for wanted, own in zip(given, drawn, strict=True))
    return msgspec.structs.replace(options, protocol=protocol, mode=mode, transport=transport)


def _replay(options: Options) -> str:
    command = f"python -m tests.chaos --seed {options.seed} --minutes {options.duration_s / 60:g}"
    command += f" --protocol {options.protocol} --mode {options.mode} --transport {options.transport} --ranks {options.ranks} --rate {options.rate:g}"
    command += f" --gap {options.gap_s:g}"
    if options.kinds != frozenset(Kind):
        command += f" --faults '{','.join(sorted(options.kinds))}'"
    return command
