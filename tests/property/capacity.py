"""What ranks may take, in a second and simpler form than the router's: for checking its choices."""

from gateway.core.eligibility import REASONS
from gateway.core.ranks import RankState
from tests.support.core import Bench

_UNLIMITED = 10**9


class Capacity:
    """Looks at the table as it is now; changes nothing."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._config = bench.config
        self._router = bench.router
        self._table = bench.router.ranks
        self._is_queued = bench.config.scheduling.mode != "direct"

    def slots(self, rank: int) -> int:
        """Sequences that may be in flight on the rank."""
        slots = self._table.max_in_flight[rank]
        if not self._is_queued:
            return slots
        info = self._table.info[rank]
        own = (info.max_num_seqs if info is not None else None) or _UNLIMITED
        return min(slots, self._config.scheduling.queue.max_in_flight_per_rank or own)

    def is_open(self, rank: int) -> bool:
        """Whether the rank can be sent anything."""
        table = self._table
        return (
            table.state[rank] is RankState.READY
            and not table.is_blocked[rank]
            and table.in_flight[rank] < self.slots(rank)
        )

    def could_ever(self, rank: int, prompt: int, max_tokens: int) -> bool:
        """Whether the rank could take it with nothing else in flight."""
        table, budget = self._table, self._table.budgets[self._table.group_of[rank]]
        return (
            prompt < table.max_model_len[rank]
            and prompt < table.kv_capacity_tokens[rank]
            and prompt <= (budget.max_prompt_tokens or _UNLIMITED)
            and prompt + max_tokens <= (budget.max_kv_tokens or _UNLIMITED)
        )

    def group_has_room(self, rank: int, prompt: int, max_tokens: int) -> bool:
        """Whether the rank's group has budget for it now."""
        table, group = self._table, self._table.group_of[rank]
        budget = table.budgets[group]
        return (
            table.group_in_flight[group] < (budget.max_requests or _UNLIMITED)
            and table.group_prompt_tokens[group] + prompt <= (budget.max_prompt_tokens or _UNLIMITED)
            and table.group_kv_tokens[group] + prompt + max_tokens <= (budget.max_kv_tokens or _UNLIMITED)
        )

    def used_kv(self, rank: int) -> float:
        """KV tokens that are taken on the rank; its report counts if it is of something that is still in flight."""
        table, at = self._table, self._table.snapshot_at[rank]
        is_reported = any(at is not None and a.sent_at < at for a in self._router._attempts.ledger.of_rank(rank))
        reported = table.kv_usage[rank] * table.kv_capacity_tokens[rank] if is_reported else 0
        return max(table.own_tokens[rank], reported)

    def check_choice(self, sequence, decision) -> None:
        """Before a charge: the request is in time, and the rank passes every hard filter now."""
        rank, arrived = decision.rank, sequence.request.arrived
        prompt, max_tokens = asks_of(sequence)
        now, request = self._bench.now, sequence.request
        assert arrived.deadline_at is None or arrived.deadline_at > now, "late"
        assert request.accepted_at + self._config.limits.max_request_age_s > now, "too old"
        assert arrived.pinned_rank in (None, rank), "a pin is never re-routed"
        assert self.is_open(rank), "no slot"
        assert self.could_ever(rank, prompt, max_tokens), "never fits"
        assert self.group_has_room(rank, prompt, max_tokens), "over the group's budget"
        used, capacity = self.used_kv(rank), self._table.kv_capacity_tokens[rank]
        if self._config.filters.kv_fit == "hard":
            assert used + prompt <= capacity, "KV"
        if self._is_queued and used:
            assert used + prompt <= self._config.scheduling.queue.kv_limit * capacity, "KV above the limit"
        assert decision.codes is None or REASONS[decision.codes[rank]] == "eligible"

    def check_gates(self) -> None:
        """In flight up to the slots, batches up to their number."""
        if not self._is_queued:
            return
        batches = self._router.batches
        for rank in range(self._table.size):
            assert self._table.in_flight[rank] <= self.slots(rank)
            if batches is not None:
                assert batches.count(rank) <= self._config.scheduling.batch.max_in_flight_batches

    def check_work(self) -> None:
        """No rank is idle while something is queued that it can take, and nothing is left that the pump could place.

        One thing excuses an idle rank: the budget of its group. What waits for room in that must not lose it to those
        behind it.
        """
        dispatcher = self._router._dispatcher
        if dispatcher is None or dispatcher._waits_for:
            return
        entries = [(entry, asks_of(entry.sequence)) for entry in dispatcher.queue.entries()]
        for rank in range(self._table.size):
            if self._table.in_flight[rank] or not self.is_open(rank):
                continue
            mine = [
                asks for entry, asks in entries if entry.pinned_rank in (None, rank) and self.could_ever(rank, *asks)
            ]
            if all(self.group_has_room(rank, *asks) for asks in mine):
                assert not mine, f"rank {rank} is idle"
        if self._router.batches is None:
            assert dispatcher.next(self._bench.now) is None, "not everything that could go went"


def asks_of(sequence) -> tuple[int, int]:
    """Prompt and output tokens that another rank would get: what was generated is prompt by now."""
    arrived, done = sequence.request.arrived, sequence.completion_tokens
    return len(arrived.prompt_token_ids) + done, arrived.sampling.max_tokens - done
