"""One rank's columns as they are written down outside: what `RankTable.restore` takes, and how it gets into them."""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from gateway.config.fields import Ratio

if TYPE_CHECKING:
    from gateway.core.ranks import RankTable

Amount = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Milliseconds that are kept as whole microseconds."""
Mean = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RankRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a snapshot. None is unknown, which means 0 for the gateway's own work.

    What follows from other columns may be left out: of the raw and the normalised counts one is enough, so is one of
    the phases of what is in flight, `own_tokens` are the queued and the context tokens, and what is reserved is at
    least the own tokens. `pending_ms` is the predicted prefill of all that has no first token yet, `head_ms` the
    head's part of it: of `head_ms` the time since it became the head is taken off, so without one nothing is.
    """

    rank: Amount
    state: Literal["ABSENT", "JOINING", "READY", "SUSPECT", "DRAINING", "EJECTED", "LOST"] = "READY"
    incarnation: int | None = None
    in_flight: Amount | None = None
    in_flight_prefill: Amount | None = None
    in_flight_decode: Amount | None = None
    queued_tokens: Amount | None = None
    ctx_tokens: Amount | None = None
    own_tokens: Amount | None = None
    prompt_tokens_in_flight: Amount | None = None
    kv_reserved_tokens: Amount | None = None
    sent_since_snapshot: Amount | None = None
    pending_ms: Duration | None = None
    head_ms: Duration | None = None
    step_ms: Duration | None = None
    mean_out_tokens: Mean | None = None
    head_age_ms: Milliseconds | None = None
    reported_running: Amount | None = None
    reported_waiting: Amount | None = None
    running: Amount | None = None
    waiting: Amount | None = None
    kv_usage: Ratio | None = None
    snapshot_age_ms: Milliseconds | None = None
    kv_capacity_tokens: Amount | None = None
    max_in_flight: Amount | None = None
    max_model_len: Amount | None = None

    @property
    def has_report(self) -> bool:
        """Whether anything is said that only a report can tell."""
        reported = (self.reported_running, self.reported_waiting, self.running, self.waiting)
        return any(value is not None for value in (*reported, self.kv_usage, self.snapshot_age_ms))


def restore_own_work(table: "RankTable", row: RankRow, now: float) -> None:
    """Set the columns of the gateway's own work; the rank has none yet."""
    rank, in_flight = row.rank, row.in_flight or 0
    prefill, decode = row.in_flight_prefill, row.in_flight_decode
    if prefill is None:
        prefill = 0 if decode is None else max(0, in_flight - decode)
    table.in_flight[rank] = in_flight
    table.in_flight_prefill[rank] = prefill
    table.in_flight_decode[rank] = max(0, in_flight - prefill) if decode is None else decode
    table.queued_tokens[rank] = row.queued_tokens or 0
    table.ctx_tokens[rank] = row.ctx_tokens or 0
    implied = table.queued_tokens[rank] + table.ctx_tokens[rank]
    own = table.own_tokens[rank] = implied if row.own_tokens is None else row.own_tokens
    prompts, reserved = row.prompt_tokens_in_flight, row.kv_reserved_tokens
    table.prompt_tokens_in_flight[rank] = own if prompts is None else prompts
    table.kv_reserved_tokens[rank] = own if reserved is None else reserved
    table.count_in_group(
        rank, table.in_flight[rank], table.prompt_tokens_in_flight[rank], table.kv_reserved_tokens[rank]
    )
    table.sent_since_snapshot[rank] = row.sent_since_snapshot or 0
    _restore_times(table, row, now)


def _restore_times(table: "RankTable", row: RankRow, now: float) -> None:
    rank = row.rank
    pending_us, head_us = round((row.pending_ms or 0.0) * 1e3), round((row.head_ms or 0.0) * 1e3)
    table.pending_us[rank] = max(pending_us, head_us)
    table.step_us[rank] = round((row.step_ms or 0.0) * 1e3)
    if row.mean_out_tokens is not None:
        table.mean_out_tokens[rank] = row.mean_out_tokens
    if row.head_age_ms is not None:
        table.set_head(rank, now - row.head_age_ms / 1e3, head_us)
    elif pending_us or head_us:
        table.set_head(rank, now, head_us)


def restore_report(table: "RankTable", row: RankRow, now: float) -> None:
    """Set the snapshot columns. Of raw and normalised counts, those that are missing follow from the others."""
    rank, is_resident = row.rank, table.is_resident[row.rank]
    waiting = row.waiting if row.waiting is not None else row.reported_waiting or 0
    running = row.running
    if running is None:
        running = row.reported_running or 0
        running = max(0, running - waiting) if is_resident else running
    raw = running + waiting if is_resident else running
    table.running[rank], table.waiting[rank] = running, waiting
    table.reported_running[rank] = raw if row.reported_running is None else row.reported_running
    table.reported_waiting[rank] = waiting if row.reported_waiting is None else row.reported_waiting
    table.kv_usage[rank] = row.kv_usage or 0.0
    table.snapshot_at[rank] = now - (row.snapshot_age_ms or 0.0) / 1e3
