"""Read-only pictures of the core for the edges that show it."""

import msgspec


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
