"""In-flight work: an id-keyed set of attempts, charged at the pick and released exactly once.

The invariant that everything rests on: for every rank, the columns that this module writes equal the
sums over that rank's live attempts (`check` verifies it). There are no bare counters to drift.
"""

# ruff: noqa: FURB136, PLR1730 - a comparison costs a tenth of a call of `max`

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from gateway.core.columns import resize
from gateway.core.counters import Counters
from gateway.core.ranks import RankTable
from gateway.core.request import Attempt


class Ledger:
    """Owns the own-work columns of the rank table."""

    def __init__(self, table: RankTable, counters: Counters) -> None:
        self._table = table
        self._counters = counters
        self.live: dict[str, Attempt] = {}
        self.by_rank: list[dict[str, Attempt]] = [{} for _ in range(table.size)]
        """Each rank's live attempts, oldest first."""
        self._unstarted: list[dict[str, Attempt]] = [{} for _ in range(table.size)]
        self._prefilled_until = [-inf] * table.size
        """Up to when a rank's time was given to attempts that have started."""

    def resize(self) -> None:
        """Take as many ranks as the table has now, and count anew what budgets of groups are counted in."""
        table = self._table
        resize(self.by_rank, table.size, dict)
        resize(self._unstarted, table.size, dict)
        resize(self._prefilled_until, table.size, lambda: -inf)
        for sums in (table.group_in_flight, table.group_prompt_tokens, table.group_kv_tokens):
            sums[:] = [0] * len(sums)
        for column in (table.prompt_tokens_in_flight, table.kv_reserved_tokens):
            column[:] = [0] * len(column)
        for attempt in self.live.values() if table.has_budgets else ():
            prompt_tokens = attempt.prompt_tokens
            self._reserve(attempt.rank, 1, prompt_tokens, prompt_tokens + attempt.max_tokens)

    def charge(self, attempt: Attempt, now: float) -> None:
        """Count an attempt on its rank. Runs in the same synchronous step as the pick.

        Its `cached_tokens`, `max_tokens` and `prefill_us` must not change from here to its release.
        """
        table, rank, wire_id = self._table, attempt.rank, attempt.wire_id
        prompt_tokens, prefill_us = attempt.prompt_tokens, attempt.prefill_us
        self.live[wire_id] = attempt
        self.by_rank[rank][wire_id] = attempt
        unstarted = self._unstarted[rank]
        if not unstarted:
            # As `set_head`, which is a call.
            table.head_since[rank] = now
            table.head_us[rank] = prefill_us
            table.head_credit_us[rank] = prefill_us if table.is_sole_gateway else 0
        unstarted[wire_id] = attempt
        in_flight = table.in_flight[rank] = table.in_flight[rank] + 1
        table.in_flight_prefill[rank] += 1
        new_tokens = prompt_tokens - attempt.cached_tokens
        table.queued_tokens[rank] += new_tokens if new_tokens > 0 else 1
        table.pending_us[rank] += prefill_us
        table.own_tokens[rank] = own = table.own_tokens[rank] + prompt_tokens
        if table.has_budgets:
            self._reserve(rank, 1, prompt_tokens, prompt_tokens + attempt.max_tokens)
        table.sent_since_snapshot[rank] += 1
        if in_flight == 1 or in_flight >= table.max_in_flight[rank]:
            table.refresh(rank)
            return
        # As `refresh` for one more in flight, which changes neither whether the rank is open nor whether it is over.
        if table.foreign[rank]:
            table.foreign[rank] -= 1
        free = capacity = table.kv_capacity_tokens[rank]
        if capacity is not inf:
            reported = table.kv_usage[rank] * capacity
            free -= reported if reported > own else own
            table.free_kv_tokens[rank] = free
            if free < table.kv_floor_tokens:
                table.kv_floor_tokens = free

    def start(self, attempt: Attempt, now: float) -> None:
        """The first token arrived: the attempt moves from prefill to decode.

        Its actual prefill is the time since it, or who was the head before it, became the head; it is compared with a
        predictor's, and left out without one. A rank's time is given away once: of several that start in one batch, the
        first gets it and the others get 0.
        """
        table, rank = self._table, attempt.rank
        attempt.first_token_at = now
        if table.times_prefill:
            since, until = table.head_since[rank], self._prefilled_until[rank]
            assert since is not None
            # Differences of rounded times, not rounded differences: their sum has no rounding error of its own.
            attempt.actual_prefill_us = max(0, round(now * 1e6) - round(max(since, until) * 1e6))
            self._prefilled_until[rank] = now
        prompt_tokens = attempt.prompt_tokens
        self._leave_unstarted(attempt, prompt_tokens, now)
        table.in_flight_prefill[rank] -= 1
        table.in_flight_decode[rank] += 1
        table.ctx_tokens[rank] += prompt_tokens

    def add_tokens(self, rank: int, count: int) -> None:
        """Tokens of a whole batch; each attempt's own count is the caller's to raise."""
        table = self._table
        table.ctx_tokens[rank] += count
        table.own_tokens[rank] += count

    def release(self, attempt: Attempt, now: float) -> bool:
        """Give back the charge. A second release is counted and changes nothing.

        Returns True when this release emptied the rank's in-flight set.
        """
        if attempt.released:
            self._counters.double_releases += 1
            return False
        attempt.released = True
        table, rank, wire_id = self._table, attempt.rank, attempt.wire_id
        del self.live[wire_id]
        mine = self.by_rank[rank]
        del mine[wire_id]
        prompt_tokens = attempt.prompt_tokens
        table.in_flight[rank] -= 1
        if table.has_budgets:
            self._reserve(rank, -1, -prompt_tokens, -prompt_tokens - attempt.max_tokens)
        if attempt.first_token_at is None:
            self._leave_unstarted(attempt, prompt_tokens, now)
            table.in_flight_prefill[rank] -= 1
            table.own_tokens[rank] -= prompt_tokens
        else:
            held = prompt_tokens + attempt.tokens_out
            table.in_flight_decode[rank] -= 1
            table.ctx_tokens[rank] -= held
            table.own_tokens[rank] -= held
        table.refresh(rank)
        return not mine

    def take_back(self, attempt: Attempt, now: float) -> bool:
        """Undo a charge whose request never left the gateway: also its mark since the last snapshot.

        Returns True when this emptied the rank's in-flight set.
        """
        is_empty = self.release(attempt, now)
        since = self._table.sent_since_snapshot
        since[attempt.rank] = max(0, since[attempt.rank] - 1)
        return is_empty

    @contextmanager
    def without(self, attempt: Attempt) -> Iterator[None]:
        """Inside, the budget of its group is as if the live attempt were released: for deciding where else it could go."""
        kv_tokens = attempt.prompt_tokens + attempt.max_tokens
        has_budgets = self._table.has_budgets
        if has_budgets:
            self._reserve(attempt.rank, -1, -attempt.prompt_tokens, -kv_tokens)
        try:
            yield
        finally:
            if has_budgets:
                self._reserve(attempt.rank, 1, attempt.prompt_tokens, kv_tokens)

    def of_rank(self, rank: int) -> list[Attempt]:
        """The rank's live attempts, oldest first."""
        return list(self.by_rank[rank].values())

    def audit(self, rank: int) -> list[str]:
        """Names of the rank's columns that are not what its live attempts add up to. One pass over these attempts."""
        table, attempts = self._table, list(self.by_rank[rank].values())
        started = [a for a in attempts if a.first_token_at is not None]
        unstarted = [a for a in attempts if a.first_token_at is None]
        prompts, out = sum(a.prompt_tokens for a in attempts), sum(a.tokens_out for a in started)
        head_us = unstarted[0].prefill_us if unstarted else 0
        expected = {
            "in_flight": len(attempts),
            "in_flight_prefill": len(unstarted),
            "in_flight_decode": len(started),
            "queued_tokens": sum(max(1, a.prompt_tokens - a.cached_tokens) for a in unstarted),
            "ctx_tokens": sum(a.prompt_tokens for a in started) + out,
            "own_tokens": prompts + out,
            "prompt_tokens_in_flight": prompts if table.has_budgets else 0,
            "kv_reserved_tokens": prompts + sum(a.max_tokens for a in attempts) if table.has_budgets else 0,
            "pending_us": sum(a.prefill_us for a in unstarted),
            "head_us": head_us,
            "head_credit_us": head_us if table.is_sole_gateway else 0,
        }
        wrong = [name for name, value in expected.items() if getattr(table, name)[rank] != value]
        if (table.head_since[rank] is None) is not (not unstarted):
            wrong.append("head_since")
        return wrong

    def check(self) -> None:
        """Assert the invariant; for tests, after every step."""
        table = self._table
        assert sum(len(mine) for mine in self.by_rank) == len(self.live)
        for rank, mine in enumerate(self.by_rank):
            attempts = list(mine.values())
            assert all(not a.released and a.rank == rank and self.live[a.wire_id] is a for a in attempts)
            assert list(self._unstarted[rank].values()) == [a for a in attempts if a.first_token_at is None], rank
            assert self.audit(rank) == [], rank
        for group in range(len(table.group_names) if table.has_budgets else 0):
            ranks = [rank for rank in range(table.size) if table.group_of[rank] == group]
            assert table.group_in_flight[group] == sum(table.in_flight[rank] for rank in ranks), group
            assert table.group_prompt_tokens[group] == sum(table.prompt_tokens_in_flight[rank] for rank in ranks), group
            assert table.group_kv_tokens[group] == sum(table.kv_reserved_tokens[rank] for rank in ranks), group

    def _reserve(self, rank: int, attempts: int, prompt_tokens: int, kv_tokens: int) -> None:
        """What budgets of groups are counted in."""
        self._table.prompt_tokens_in_flight[rank] += prompt_tokens
        self._table.kv_reserved_tokens[rank] += kv_tokens
        self._table.count_in_group(rank, attempts, prompt_tokens, kv_tokens)

    def _leave_unstarted(self, attempt: Attempt, prompt_tokens: int, now: float) -> None:
        table, rank = self._table, attempt.rank
        unstarted = self._unstarted[rank]
        head = next(iter(unstarted.values()))
        del unstarted[attempt.wire_id]
        if not unstarted:
            table.head_since[rank] = None
            # Sums of nothing.
            table.head_us[rank] = table.head_credit_us[rank] = table.queued_tokens[rank] = table.pending_us[rank] = 0
            return
        new_tokens = prompt_tokens - attempt.cached_tokens
        table.queued_tokens[rank] -= new_tokens if new_tokens > 0 else 1
        table.pending_us[rank] -= attempt.prefill_us
        if head is attempt:
            table.set_head(rank, now, next(iter(unstarted.values())).prefill_us)
