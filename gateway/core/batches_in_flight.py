"""Batches that went to a rank and still have members there: what the bound on batches in flight counts.

Every member leaves by itself, once, at the event that ends its part: its first token or its end, whichever the settings
name; a cancel, a loss or a failed send too. A batch counts until its last member left, so one early end opens no gate
for the others. There are no bare counters: `count` is the size of the set, and `check` proves the set.

Batch numbers are this gateway's own and appear on no wire; they are never used again.
"""

from collections.abc import Sequence as Seq

from gateway.core.columns import resize
from gateway.core.request import Attempt


class InFlightBatch:
    """A batch on its way. `size` is what was sent, `members` (in order) are those that have not left."""

    __slots__ = ("members", "number", "rank", "size")

    def __init__(self, number: int, rank: int, attempts: Seq[Attempt]) -> None:
        self.number = number
        self.rank = rank
        self.size = len(attempts)
        self.members: dict[Attempt, None] = dict.fromkeys(attempts)


class BatchesInFlight:
    """Owns all batches in flight, by rank, and `Attempt.batch`."""

    def __init__(self, ranks: int) -> None:
        self._of_rank: list[dict[int, InFlightBatch]] = [{} for _ in range(ranks)]
        self._last_number = 0

    def resize(self, ranks: int) -> None:
        """Count for another number of ranks; those that are left out have no batches."""
        resize(self._of_rank, ranks, dict)

    def open(self, rank: int, attempts: Seq[Attempt]) -> InFlightBatch:
        """Count a batch that goes to `rank` now. An attempt is a member of one batch in its life."""
        assert attempts, "a batch has members"
        assert all(attempt.rank == rank and attempt.batch is None for attempt in attempts), rank
        self._last_number += 1
        batch = InFlightBatch(self._last_number, rank, attempts)
        assert len(batch.members) == batch.size, "a member twice"
        self._of_rank[rank][batch.number] = batch
        for attempt in attempts:
            attempt.batch = batch
        return batch

    def leave(self, attempt: Attempt) -> bool:
        """Take a member out of its batch. Says whether that was the last one: the rank has a batch less.

        Changes nothing when the attempt left before, or was never in a batch. `attempt.batch` stays: it says where the
        attempt was.
        """
        batch = attempt.batch
        if batch is None or attempt not in batch.members:
            return False
        del batch.members[attempt]
        if batch.members:
            return False
        del self._of_rank[batch.rank][batch.number]
        return True

    def count(self, rank: int) -> int:
        """How many batches of the rank have members left."""
        return len(self._of_rank[rank])

    def at_limit(self, limit: int) -> list[int]:
        """The ranks with `limit` batches or more that have members left."""
        return [rank for rank, batches in enumerate(self._of_rank) if len(batches) >= limit]

    def of_rank(self, rank: int) -> list[InFlightBatch]:
        """The rank's batches with members left, oldest first."""
        return list(self._of_rank[rank].values())

    def check(self) -> None:
        """Assert the invariants; for tests, after every step."""
        for rank, batches in enumerate(self._of_rank):
            assert list(batches) == sorted(batches), rank
            for number, batch in batches.items():
                assert (batch.number, batch.rank) == (number, rank)
                assert number <= self._last_number
                assert 0 < len(batch.members) <= batch.size, number
                for attempt in batch.members:
                    # It names one batch: nobody is a member of two.
                    assert attempt.batch is batch, number
                    assert attempt.rank == rank, number
                    assert not attempt.released, "a charge was given back, but its batch still counts it"
