"""What the terminal line of a request says: its fields, and where each of them comes from."""

from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.core.request import Attempt, Request
from gateway.edges.waiting import queue_ms


class TerminalLine(msgspec.Struct, kw_only=True):
    """The fields of a terminal line in their order. What is unset is not there."""

    timestamp: datetime | UnsetType = UNSET
    level: Literal["info", "warning"]
    event: str = "request_ended"
    logger: str | UnsetType = UNSET
    request_id: str
    rpc: str
    outcome: str
    error: str | None
    rank: int | None
    incarnation: int | None
    ranks: list[int] | None
    pinned_rank: int | None
    decision_id: int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    n: int
    queue_ms: float
    ttft_ms: float | None
    e2e_ms: float
    attempts: int
    tenant: str | UnsetType = UNSET
    cached: bool | UnsetType = UNSET
    batch: int | UnsetType = UNSET


OWN_FIELDS_AT = 4
"""Before them come those that all lines have."""


def set_fields(line: TerminalLine, first: int) -> dict[str, Any]:
    """The fields that are there, from a number on."""
    names = TerminalLine.__struct_fields__[first:]
    return {name: value for name in names if (value := getattr(line, name)) is not UNSET}


def describe(request: Request, now: float, level: Literal["info", "warning"]) -> TerminalLine:
    """The line of an ended request, but for its time and its logger."""
    error, arrived, sequences = request.error, request.arrived, request.sequences
    started, first, ended = request.accepted_at, request.first_token_at, request.ended_at
    if ended is None:
        ended = now
    # One sequence is what nearly all requests have; `_add_up` corrects what follows for the others.
    sequence = sequences[0]
    attempt = sequence.attempt
    sent_at = ended if sequence.sent_at is None else sequence.sent_at
    line = TerminalLine(
        level=level,
        request_id=arrived.request_id,
        rpc=getattr(request.sink, "rpc", "unknown"),
        outcome="ok" if error is None else error.reason.value,
        error=None if error is None else error.message,
        rank=request.last_rank,
        incarnation=None if attempt is None else attempt.incarnation,
        ranks=None,
        pinned_rank=arrived.pinned_rank,
        decision_id=request.decision_id,
        prompt_tokens=len(arrived.prompt_token_ids),
        completion_tokens=sequence.completion_tokens,
        cached_tokens=sequence.cached_tokens,
        n=1,
        # Whole microseconds; `round` takes four times as long.
        queue_ms=int((sent_at - started) * 1e6 + 0.5) / 1e3,
        ttft_ms=None if first is None else int((first - started) * 1e6 + 0.5) / 1e3,
        e2e_ms=int((ended - started) * 1e6 + 0.5) / 1e3,
        attempts=sequence.attempts,
    )
    if len(sequences) > 1:
        attempt = _add_up(line, request)
    if arrived.tenant:
        line.tenant = arrived.tenant
    if request.is_cached:
        line.cached = True
    if attempt is not None and attempt.batch is not None:
        line.batch = attempt.batch.number
    return line


def _add_up(line: TerminalLine, request: Request) -> Attempt | None:
    """Make the line one of all sequences; return the last attempt."""
    sequences = request.sequences
    attempts = [sequence.attempt for sequence in sequences if sequence.attempt is not None]
    line.n = len(sequences)
    line.incarnation = attempts[-1].incarnation if attempts else None
    line.ranks = [attempt.rank for attempt in attempts] if len(attempts) > 1 else None
    line.completion_tokens = sum(sequence.completion_tokens for sequence in sequences)
    line.cached_tokens = max(sequence.cached_tokens for sequence in sequences)
    line.queue_ms = round(queue_ms(request), 3)
    line.attempts = sum(sequence.attempts for sequence in sequences)
    return attempts[-1] if attempts else None
