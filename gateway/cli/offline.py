"""`rankgate explain` without a gateway: the same core, fed from a snapshot file.

The snapshot is what `rankgate ranks --json` prints, so a listing of a live gateway can be explained
later; columns that a listing doesn't have can be added by hand.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from gateway.config.convert import convert
from gateway.config.document import Document
from gateway.config.schema import Config, Count, Ratio, TokenId
from gateway.core.decisions import Decision
from gateway.core.events import RequestArrived
from gateway.core.ranks import RankState
from gateway.core.router import Router
from gateway.types import RankInfo, Sampling

T = TypeVar("T")
Amount = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]

_NOW_S = 1e6
"""The core's clock at the snapshot: large enough for any age to lie behind it."""
_OWN_COLUMNS = (
    "in_flight",
    "in_flight_prefill",
    "in_flight_decode",
    "queued_tokens",
    "ctx_tokens",
    "sent_since_snapshot",
)
_REPORT_COLUMNS = ("reported_running", "reported_waiting", "running", "waiting")


class RankRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a snapshot. What is left out is unknown, which means 0 for the gateway's own work."""

    rank: Amount
    state: Literal["ABSENT", "READY", "LOST"] = "READY"
    in_flight: Amount | None = None
    in_flight_prefill: Amount | None = None
    in_flight_decode: Amount | None = None
    queued_tokens: Amount | None = None
    ctx_tokens: Amount | None = None
    own_tokens: Amount | None = None
    sent_since_snapshot: Amount | None = None
    head_age_ms: Milliseconds | None = None
    reported_running: Amount | None = None
    reported_waiting: Amount | None = None
    running: Amount | None = None
    waiting: Amount | None = None
    kv_usage: Ratio | None = None
    kv_capacity_tokens: Amount | None = None
    snapshot_age_ms: Milliseconds | None = None
    max_in_flight: Amount | None = None
    max_model_len: Amount | None = None
    # In a listing, but either fixed by the configuration or computed from the rest.
    group: str | None = None
    group_rank: Amount | None = None
    incarnation: int | None = None
    foreign: Amount | None = None
    cost: float | None = None


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The snapshot: ranks that are left out are READY and idle."""

    ranks: tuple[RankRow, ...]


class RequestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request, with the names of `gateway.v1.GenerateRequest`; a token count may stand for the tokens."""

    prompt_tokens: Count | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    max_tokens: Count | None = None
    data_parallel_rank: int | None = None
    priority: int = 0
    request_id: str = ""
    model: str | None = None


def read_snapshot(text: str, path: Path | str, size: int) -> SnapshotFile:
    """Read a snapshot for `size` ranks. Raises `ConfigError`."""
    document, snapshot = _read(text, path, SnapshotFile)
    seen: set[int] = set()
    for number, row in enumerate(snapshot.ranks):
        place = ("ranks", number, "rank")
        if row.rank >= size:
            raise document.error(place, f"there is no rank {row.rank}; the configuration has 0 to {size - 1}")
        if row.rank in seen:
            raise document.error(place, f"rank {row.rank} is listed twice")
        seen.add(row.rank)
    return snapshot


def read_request(text: str, path: Path | str) -> RequestFile:
    """Read a request. Raises `ConfigError`."""
    document, request = _read(text, path, RequestFile)
    if (request.prompt_tokens is None) == (request.prompt_token_ids is None):
        raise document.error((), "set either 'prompt_tokens' or 'prompt_token_ids'")
    return request


def decide(config: Config, snapshot: SnapshotFile, request: RequestFile) -> Decision:
    """What the gateway would decide. Raises `GatewayError` for a request that it would refuse unseen."""
    router = Router(config, nonce="0" * 16, rng=lambda: 0.0)
    rows = {row.rank: row for row in snapshot.ranks}
    for rank in range(router.ranks.size):
        _fill(router, rank, rows.get(rank) or RankRow(rank=rank), config.model.max_context_tokens)
    return router.explain(arrive(config, request), _NOW_S)


def arrive(config: Config, request: RequestFile) -> RequestArrived:
    """The request as the core sees it; `max_tokens` defaults to what the context leaves."""
    prompt = request.prompt_token_ids if request.prompt_token_ids is not None else (0,) * (request.prompt_tokens or 1)
    max_tokens = request.max_tokens or max(1, config.model.max_context_tokens - len(prompt))
    return RequestArrived(
        client_key="",
        request_id=request.request_id,
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens),
        model=request.model,
        pinned_rank=request.data_parallel_rank,
        priority=request.priority,
    )


def _read(text: str, path: Path | str, into: type[T]) -> tuple[Document, T]:
    document = Document(text, path)
    if not isinstance(document.data, dict):
        raise document.error((), "expected a mapping")
    return document, convert(document, document.data, into)


def _fill(router: Router, rank: int, row: RankRow, max_context_tokens: int) -> None:
    """Put one row into the rank table, as a rank that joined, was sent work and reported would have left it."""
    table = router.ranks
    info = RankInfo(max_model_len=row.max_model_len or max_context_tokens, kv_capacity_tokens=row.kv_capacity_tokens)
    table.join(rank, row.incarnation or 1, info)
    table.state[rank] = RankState(row.state)
    if row.max_in_flight is not None:
        table.max_in_flight[rank] = row.max_in_flight
    for name in _OWN_COLUMNS:
        getattr(table, name)[rank] = getattr(row, name) or 0
    in_flight, prefill, decode = table.in_flight[rank], row.in_flight_prefill, row.in_flight_decode
    if prefill is None:
        prefill = max(0, in_flight - decode) if decode is not None else 0
    table.in_flight_prefill[rank] = prefill
    table.in_flight_decode[rank] = decode if decode is not None else max(0, in_flight - prefill)
    own_tokens = row.own_tokens
    table.own_tokens[rank] = (
        own_tokens if own_tokens is not None else table.queued_tokens[rank] + table.ctx_tokens[rank]
    )
    if row.head_age_ms is not None:
        table.head_since[rank] = _NOW_S - row.head_age_ms / 1000
    _fill_report(router, rank, row)
    table.refresh(rank)


def _fill_report(router: Router, rank: int, row: RankRow) -> None:
    """The last report. Of raw and normalised counts, those that are missing follow from the others."""
    table = router.ranks
    has_report = row.kv_usage is not None or any(getattr(row, name) is not None for name in _REPORT_COLUMNS)
    if not has_report and row.snapshot_age_ms is None:
        return
    is_resident = table.is_resident[rank]
    waiting = row.waiting if row.waiting is not None else row.reported_waiting or 0
    running = row.running
    if running is None:
        running = row.reported_running or 0
        running = max(0, running - waiting) if is_resident else running
    table.running[rank], table.waiting[rank] = running, waiting
    raw = running + waiting if is_resident else running
    table.reported_running[rank] = row.reported_running if row.reported_running is not None else raw
    table.reported_waiting[rank] = row.reported_waiting if row.reported_waiting is not None else waiting
    table.kv_usage[rank] = row.kv_usage or 0.0
    table.snapshot_at[rank] = _NOW_S - (row.snapshot_age_ms or 0.0) / 1000
