"""What a rank has done and holds: counters, gauges and rates, all JSON-safe. The clock is the caller's.

Two views of KV are kept apart. `used_bytes` are stored positions at the end of a step, after finished
sequences were released; `reserved_bytes` are the blocks that hold them; `high_water_bytes` is the most
that was stored at any moment of any step, which is what a budget must bound.

Occupancy counts decode rows, and its mean is over the steps that had any. A ratio without a denominator
is 0.0, a figure that nothing measures is None.
"""

from typing import Any

from engine_stub.backend import BackendInfo
from engine_stub.scheduler import Admission, Scheduler, StepPlan


class Rate:
    """Mean of a counter per second over the latest full interval; 0.0 before the first one has passed."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._since = now
        self._start = 0
        self._per_s = 0.0

    def at(self, now: float, total: int) -> float:
        """The rate, given the counter's value now. `now` is monotonic, in s."""
        elapsed = now - self._since
        if elapsed >= self._interval_s:
            self._per_s = (total - self._start) / elapsed
            self._since, self._start = now, total
        return self._per_s


class Telemetry:
    """Figures of one rank's scheduler. `observe` is called once per step, `snapshot` at any time."""

    def __init__(self, scheduler: Scheduler, info: BackendInfo, *, interval_s: float = 1.0, now: float = 0.0) -> None:
        self.ticks = 0
        self.decode_ticks = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.occupancy_last = 0
        self.occupancy_max = 0
        self.kv_used_peak_tokens = 0
        self.kv_reserved_peak_blocks = 0
        self.active_peak = 0
        self._scheduler = scheduler
        self._info = info
        self._prefill_rate = Rate(interval_s, now)
        self._decode_rate = Rate(interval_s, now)

    @property
    def active_now(self) -> int:
        """Sequences with a slot, as the scheduler counts them."""
        return self._scheduler.active_count

    @property
    def short_cuts(self) -> int:
        """Steps that were planned for a lone sequence, without looking at anything else."""
        return self._scheduler.short_cuts

    @property
    def occupancy_avg(self) -> float:
        """Mean decode rows over the steps that decoded."""
        return _ratio(self.decode_tokens, self.decode_ticks)

    @property
    def kv_used_peak_bytes(self) -> int:
        """Most KV that was stored at the end of a step."""
        return self.kv_used_peak_tokens * self._info.kv_bytes_per_token

    def observe(self, plan: StepPlan, now: float) -> None:
        """Count a step that was committed. `now` is monotonic, in s."""
        scheduler = self._scheduler
        rows = plan.decode_rows
        self.ticks += 1
        self.occupancy_last = rows
        self.prefill_tokens += plan.prefill_tokens
        if rows:
            self.decode_ticks += 1
            self.decode_tokens += rows
            self.occupancy_max = max(self.occupancy_max, rows)
        self.kv_used_peak_tokens = max(self.kv_used_peak_tokens, scheduler.kv.used_tokens)
        self.kv_reserved_peak_blocks = max(self.kv_reserved_peak_blocks, scheduler.pool.used)
        self.active_peak = max(self.active_peak, scheduler.active_count)
        self._prefill_rate.at(now, self.prefill_tokens)
        self._decode_rate.at(now, self.decode_tokens)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything, JSON-safe: ints, finite floats, strings, None."""
        scheduler, config = self._scheduler, self._scheduler.config
        finishes = scheduler.finishes
        return {
            "ticks": self.ticks,
            "decode_ticks": self.decode_ticks,
            "active_sessions": scheduler.active_count,
            "queue_depth": scheduler.waiting_count,
            "batch_occupancy": {
                "last": self.occupancy_last,
                "avg": self.occupancy_avg,
                "max": self.occupancy_max,
            },
            "kv": self._kv(),
            "prefix_cache": self._prefix_cache(),
            "scratch": _memory(scheduler.active_count * config.scratch_bytes_per_session, config.scratch_bytes),
            "weights": {"bytes": self._info.weight_bytes, "budget_bytes": config.weight_budget_bytes},
            "prefill_tokens": {
                "total": self.prefill_tokens,
                "per_s": self._prefill_rate.at(now, self.prefill_tokens),
            },
            "decode_tokens": {"total": self.decode_tokens, "per_s": self._decode_rate.at(now, self.decode_tokens)},
            "admissions": {reason.value: scheduler.admissions[reason] for reason in Admission},
            "rejected": sum(count for reason, count in scheduler.admissions.items() if not reason.is_accepted),
            "preemptions": scheduler.preemptions,
            "cache_misses": finishes["cache_miss"],
            "failed": finishes["error"],
            "aborted": finishes["abort"],
            "completed": finishes["stop"] + finishes["length"],
        }

    def _kv(self) -> dict[str, Any]:
        kv, per_token = self._scheduler.kv, self._info.kv_bytes_per_token
        per_block = per_token * kv.block_size
        return {
            "used_bytes": kv.used_tokens * per_token,
            "used_peak_bytes": self.kv_used_peak_bytes,
            "reserved_bytes": kv.pool.used * per_block,
            "reserved_peak_bytes": self.kv_reserved_peak_blocks * per_block,
            "high_water_bytes": kv.high_water_tokens * per_token,
            "reserved_high_water_bytes": kv.pool.high_water * per_block,
            "cached_bytes": kv.pool.idle * per_block,
            "budget_bytes": kv.pool.total * per_block,
            "pressure": _ratio(kv.pool.used, kv.pool.total),
        }

    def _prefix_cache(self) -> dict[str, Any] | None:
        """None without a cache."""
        prefix = self._scheduler.kv.prefix
        if prefix is None:
            return None
        stats = prefix.stats
        return {
            "blocks": len(prefix),
            "requests": stats.requests,
            "queried_tokens": stats.queries,
            "hit_tokens": stats.hits,
            "hit_ratio": _ratio(stats.hits, stats.queries),
            "evictions": stats.evictions,
        }


def _memory(used: int, budget: int | None) -> dict[str, Any]:
    return {
        "used_bytes": used,
        "budget_bytes": budget,
        "pressure": None if budget is None else _ratio(used, budget),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
