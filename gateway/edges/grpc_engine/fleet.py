"""The ranks as the standard engine services show them: as one engine with data-parallel ranks.

These services carry plain integers, so "not reported" cannot be said. What stands in for it is this
gateway's own work on the rank, which is exact, and never a made-up idle rank.
"""

import time
from math import inf

import msgspec

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.edges.driver import Driver

_INT32_MAX = 2**31 - 1


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's load as plain numbers: its last snapshot, else what this gateway has in flight there.

    `total` counts each request once, also where the engine's `running` includes its waiting ones.
    """

    rank: int
    running: int
    waiting: int
    total: int
    used_tokens: int
    max_tokens: int
    token_usage: float
    max_running: int
    queued_tokens: int


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks seen as one engine. Per-rank properties are the smallest that a rank reported, else 0."""

    ranks: int
    live_requests: int
    started_at_unix_s: float
    uptime_s: float
    engine_version: str
    dtype: str
    block_size: int
    max_num_seqs: int
    max_tokens: int


class FleetView:
    """Reads the core on demand; keeps nothing but the time of its own start."""

    def __init__(self, config: Config, driver: Driver) -> None:
        self._config = config
        self._driver = driver
        self._started_at_unix_s = time.time()
        self._started_at = driver.clock()

    def health(self) -> tuple[bool, str]:
        """Whether new requests are welcome, and why not."""
        if self._driver.is_stopping:
            return False, "the gateway is stopping"
        problem = self._driver.router.why_not_ready()
        return problem is None, problem or "ok"

    def loads(self, dp_rank: int | None) -> list[RankLoad]:
        """Every rank's load, or one's. Raises INVALID_RANK for a rank that does not exist."""
        size = self._driver.router.ranks.size
        if dp_rank is None:
            return [self._load(rank) for rank in range(size)]
        if not 0 <= dp_rank < size:
            raise GatewayError(
                Reason.INVALID_RANK,
                f"dp_rank {dp_rank} does not exist; valid ranks are 0..{size - 1}",
                rank=dp_rank,
                valid_min=0,
                valid_max=size - 1,
            )
        return [self._load(dp_rank)]

    def summary(self) -> Fleet:
        """The ranks as one engine."""
        router = self._driver.router
        infos = [info for info in router.ranks.info if info is not None]
        capacities = [capacity for capacity in router.ranks.kv_capacity_tokens if capacity != inf]
        return Fleet(
            ranks=router.ranks.size,
            live_requests=router.live_count,
            started_at_unix_s=self._started_at_unix_s,
            uptime_s=self._driver.clock() - self._started_at,
            engine_version=next((info.engine_version for info in infos if info.engine_version), ""),
            dtype=next((info.dtype for info in infos if info.dtype), ""),
            block_size=min((info.block_size for info in infos if info.block_size), default=0),
            max_num_seqs=min((info.max_num_seqs for info in infos if info.max_num_seqs), default=0),
            max_tokens=_int32(min(capacities, default=0)),
        )

    def _load(self, rank: int) -> RankLoad:
        ranks = self._driver.router.ranks
        info, capacity = ranks.info[rank], ranks.kv_capacity_tokens[rank]
        if ranks.snapshot_at[rank] is None:
            running, waiting, total = ranks.in_flight[rank], 0, ranks.in_flight[rank]
            usage = ranks.own_tokens[rank] / capacity  # 0 where the capacity is unknown (infinite)
            used = ranks.own_tokens[rank]
        else:
            running, waiting = ranks.reported_running[rank], ranks.reported_waiting[rank]
            total = running if ranks.is_resident[rank] else running + waiting
            usage = ranks.kv_usage[rank]
            used = ranks.own_tokens[rank] if capacity == inf else round(usage * capacity)
        return RankLoad(
            rank=rank,
            running=_int32(running),
            waiting=_int32(waiting),
            total=_int32(total),
            used_tokens=_int32(used),
            max_tokens=0 if capacity == inf else _int32(capacity),
            token_usage=usage,
            max_running=_int32(info.max_num_seqs or 0) if info is not None else 0,
            queued_tokens=_int32(ranks.queued_tokens[rank]),
        )


def _int32(value: float) -> int:
    return min(_INT32_MAX, int(value))
