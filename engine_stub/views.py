"""JSON-safe pictures of a rank for the control socket."""

from typing import TYPE_CHECKING, Any

import msgspec

from engine_stub.effective import effective_config

if TYPE_CHECKING:
    from engine_stub.rank import StubRank

LATEST = 16
"""Bad inputs and refusals that `state` lists; the counts beside them are exact."""


def state(rank: "StubRank") -> dict[str, Any]:
    """Where the rank is and what it has seen."""
    engine, records = rank.engine, rank.records
    scheduler = engine.scheduler
    pool = scheduler.pool
    return {
        "rank": rank.number,
        "phase": rank.phase.value,
        "fate": engine.fate.value,
        "incarnation": rank.incarnation,
        "live": sorted(rank.live_ids),
        "active": scheduler.active_count,
        "waiting": scheduler.waiting_count,
        "kv_blocks": {"used": pool.used, "total": pool.total, "high_water": pool.high_water},
        "preemptions": scheduler.preemptions,
        "refusals": {
            "count": {reason.value: count for reason, count in records.refused.items()},
            "latest": msgspec.to_builtins(list(records.refusals)[-LATEST:]),
        },
        "steps": records.steps,
        "batches": records.batches,
        "tokens_generated": records.tokens,
        "adds_received": records.adds,
        "aborts_received": records.aborts,
        "bad_inputs": {"count": records.bad, "latest": msgspec.to_builtins(list(records.bad_inputs)[-LATEST:])},
        "faults": msgspec.to_builtins(rank.faults),
    }


def telemetry(rank: "StubRank") -> dict[str, Any]:
    """Counters, gauges and rates of the current incarnation."""
    return {"rank": rank.number, "incarnation": rank.incarnation, **rank.engine.report()}


def effective(rank: "StubRank") -> dict[str, Any]:
    """What the rank runs with; live figures only while it serves."""
    engine = rank.engine
    live = engine.telemetry if rank.is_serving else None
    return {"rank": rank.number, **effective_config(rank.config, engine.backend.info, live)}


def events(rank: "StubRank", request_id: str | None = None) -> dict[str, Any]:
    """The event log, of one request or of all; `events` is None when nothing is logged."""
    log = rank.engine.log
    listed = None if log is None else list(log.events) if request_id is None else log.of(request_id)
    return {"rank": rank.number, "events": listed}
