"""In-flight work: an id-keyed set of attempts, charged at the pick and released exactly once.

The invariant that everything rests on: for every rank, the columns that this module writes equal the
sums over that rank's live attempts (`check` verifies it). There are no bare counters to drift.
"""

from gateway.core.counters import Counters
from gateway.core.ranks import RankTable
from gateway.core.request import Attempt


class Ledger:
    """Owns the own-work columns of the rank table."""

    def __init__(self, table: RankTable, counters: Counters) -> None:
        self._table = table
        self._counters = counters
        self.live: dict[str, Attempt] = {}
        self._of_rank: list[dict[str, Attempt]] = [{} for _ in range(table.size)]
        self._unstarted: list[dict[str, Attempt]] = [{} for _ in range(table.size)]

    def charge(self, attempt: Attempt, now: float) -> None:
        """Count an attempt on its rank. Runs in the same synchronous step as the pick."""
        table, rank = self._table, attempt.rank
        self.live[attempt.wire_id] = attempt
        self._of_rank[rank][attempt.wire_id] = attempt
        unstarted = self._unstarted[rank]
        if not unstarted:
            table.head_since[rank] = now
        unstarted[attempt.wire_id] = attempt
        table.in_flight[rank] += 1
        table.in_flight_prefill[rank] += 1
        table.queued_tokens[rank] += max(1, attempt.prompt_tokens - attempt.cached_tokens)
        table.own_tokens[rank] += attempt.prompt_tokens
        table.sent_since_snapshot[rank] += 1
        table.refresh(rank)

    def start(self, attempt: Attempt, now: float) -> None:
        """The first token arrived: the attempt moves from prefill to decode."""
        table, rank = self._table, attempt.rank
        attempt.first_token_at = now
        self._leave_unstarted(attempt, now)
        table.in_flight_prefill[rank] -= 1
        table.in_flight_decode[rank] += 1
        table.ctx_tokens[rank] += attempt.prompt_tokens

    def add_tokens(self, rank: int, count: int) -> None:
        """Tokens of a whole batch; each attempt's own count is the caller's to raise."""
        self._table.ctx_tokens[rank] += count
        self._table.own_tokens[rank] += count

    def release(self, attempt: Attempt, now: float) -> bool:
        """Give back the charge. A second release is counted and changes nothing.

        Returns True when this release emptied the rank's in-flight set.
        """
        if attempt.released:
            self._counters.double_releases += 1
            return False
        attempt.released = True
        table, rank = self._table, attempt.rank
        del self.live[attempt.wire_id]
        mine = self._of_rank[rank]
        del mine[attempt.wire_id]
        table.in_flight[rank] -= 1
        if attempt.first_token_at is None:
            self._leave_unstarted(attempt, now)
            table.in_flight_prefill[rank] -= 1
            table.own_tokens[rank] -= attempt.prompt_tokens
        else:
            held = attempt.prompt_tokens + attempt.tokens_out
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

    def of_rank(self, rank: int) -> list[Attempt]:
        """The rank's live attempts, oldest first."""
        return list(self._of_rank[rank].values())

    def check(self) -> None:
        """Assert the invariant; for tests, after every step."""
        table = self._table
        assert sum(len(mine) for mine in self._of_rank) == len(self.live)
        for rank, mine in enumerate(self._of_rank):
            attempts = list(mine.values())
            started = [a for a in attempts if a.first_token_at is not None]
            unstarted = [a for a in attempts if a.first_token_at is None]
            assert all(not a.released and a.rank == rank and self.live[a.wire_id] is a for a in attempts)
            assert list(self._unstarted[rank].values()) == unstarted, rank
            assert (table.head_since[rank] is None) == (not unstarted), rank
            assert table.in_flight[rank] == len(attempts), rank
            assert table.in_flight_prefill[rank] == len(unstarted), rank
            assert table.in_flight_decode[rank] == len(started), rank
            queued = sum(max(1, a.prompt_tokens - a.cached_tokens) for a in unstarted)
            assert table.queued_tokens[rank] == queued, rank
            context = sum(a.prompt_tokens + a.tokens_out for a in started)
            assert table.ctx_tokens[rank] == context, rank
            assert table.own_tokens[rank] == context + sum(a.prompt_tokens for a in unstarted), rank

    def _leave_unstarted(self, attempt: Attempt, now: float) -> None:
        table, rank = self._table, attempt.rank
        unstarted = self._unstarted[rank]
        was_head = next(iter(unstarted)) == attempt.wire_id
        del unstarted[attempt.wire_id]
        table.queued_tokens[rank] -= max(1, attempt.prompt_tokens - attempt.cached_tokens)
        if not unstarted:
            table.head_since[rank] = None
        elif was_head:
            table.head_since[rank] = now
