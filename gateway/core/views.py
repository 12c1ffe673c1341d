"""Read-only pictures of the core for the edges that show it."""

from math import isfinite

import msgspec

from gateway.core.ranks import RankTable


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as an operator sees it. None where the rank did not report; never an invented zero."""

    rank: int
    group: str
    group_rank: int
    state: str
    incarnation: int
    in_flight: int
    reported_running: int | None
    reported_waiting: int | None
    running: int | None
    waiting: int | None
    foreign: int | None
    kv_usage: float | None
    snapshot_age_ms: float | None
    cost: float | None


def rank_view(table: RankTable, rank: int, now: float, cost: float) -> RankView:
    """One row of the table; a cost that is not finite shows as None."""
    at = table.snapshot_at[rank]
    has_report = at is not None
    return RankView(
        rank=rank,
        group=table.group_names[table.group_of[rank]],
        group_rank=table.group_rank[rank],
        state=table.state[rank].value,
        incarnation=table.incarnation[rank],
        in_flight=table.in_flight[rank],
        reported_running=table.reported_running[rank] if has_report else None,
        reported_waiting=table.reported_waiting[rank] if has_report else None,
        running=table.running[rank] if has_report else None,
        waiting=table.waiting[rank] if has_report else None,
        foreign=table.foreign[rank] if has_report else None,
        kv_usage=table.kv_usage[rank] if has_report else None,
        snapshot_age_ms=(now - at) * 1e3 if at is not None else None,
        cost=cost if isfinite(cost) else None,
    )
