"""The gate of each rank: whether it may be given more work now.

A rank is open while it is eligible at all, has a slot, and has little work that it has not started: so that a
sequence is bound to a rank as late as possible, and its place in the order stays the gateway's to decide. A rank without
un-started work is open whatever is predicted: predictions that are too high slow it down but never starve it.

`states` is asked at every event while something is queued, so it is one pass over the columns; only ranks with
un-started work cost a prediction. `kv_fits` is per request and rank.
"""

from math import inf

from gateway.config.scheduling import Queue
from gateway.core.predictor import Predictor
from gateway.core.ranks import RankTable
from gateway.types import RankInfo

GATE_REASONS = ("open", "not_open", "in_flight", "unstarted_work", "batches")
"""What the states mean; `batches` (enough batches in flight) is set by the dispatcher."""
_OPEN, _NOT_OPEN, _IN_FLIGHT, _UNSTARTED_WORK, _ = range(len(GATE_REASONS))
_UNLIMITED = 1 << 62


class Gate:
    """All ranks' gates. Reads the table, changes nothing."""

    def __init__(self, settings: Queue, table: RankTable, predictor: Predictor) -> None:
        self._table = table
        self._predictor = predictor
        self.configure(settings)

    def configure(self, settings: Queue) -> None:
        """Go by these settings, for as many ranks as the table has now."""
        self._max_in_flight = settings.max_in_flight_per_rank
        self._kv_limit = settings.kv_limit
        self._limit_us = None if settings.gate_ms is None else settings.gate_ms * 1e3
        self._limit_steps = settings.gate_steps
        self._limit_tokens = settings.gate_tokens
        self._ranks = range(self._table.size)
        self._infos: list[RankInfo | None] = []
        self._slots: list[int] = []
        self._kept_free = inf
        """The most that `kv_limit` keeps free on any rank."""

    def states(self, now: float) -> bytes:
        """Per rank an index into `GATE_REASONS`, the first that applies; 0 is open."""
        table = self._table
        if self._infos != table.info:
            self._read_slots()
        columns = zip(self._ranks, table.is_open, table.in_flight, self._slots, table.in_flight_prefill, strict=True)
        return bytes(
            [
                _NOT_OPEN
                if not is_open
                else _IN_FLIGHT
                if in_flight >= slots
                else _UNSTARTED_WORK
                if unstarted and self._has_enough(rank, now)
                else _OPEN
                for rank, is_open, in_flight, slots, unstarted in columns
            ]
        )

    def slots(self, rank: int) -> int:
        """Sequences that may be in flight on the rank, as of the last `states`."""
        return min(self._slots[rank], self._table.max_in_flight[rank])

    def kv_fits(self, rank: int, prompt_tokens: int, ahead: int = 0) -> bool:
        """Whether the prompt fits beside the contexts that the rank has now, within `kv_limit` of its capacity.

        `ahead` are prompt tokens of a batch that go there before it and are not charged yet.

        Contexts are the larger of our own count, un-started prompts included, and the rank's report. What running
        sequences may grow to is left out: with it, ranks with long generations are kept half empty. A rank with nothing
        in flight always takes the prompt, as no wait makes more room there; whether it can ever hold it is a filter's
        question. Its last report was taken when there was something, and does not count.
        """
        table = self._table
        is_busy = table.in_flight[rank] > 0
        if not is_busy and not ahead:
            return True
        capacity = table.kv_capacity_tokens[rank]
        usage = table.kv_usage[rank] if is_busy else 0
        used = max(table.own_tokens[rank] + ahead, usage * capacity if usage else 0)
        return used + prompt_tokens <= self._kv_limit * capacity

    def kv_fits_everywhere(self, prompt_tokens: int) -> bool:
        """Whether `kv_fits` holds for every rank, as of the last `states`; False may also mean "look closer".

        A rank's free tokens are its capacity less the contexts that `kv_fits` counts.
        """
        table, needed = self._table, prompt_tokens + self._kept_free
        return not table.has_kv_limit or needed < table.kv_floor_tokens or needed < table.raise_kv_floor()

    def _has_enough(self, rank: int, now: float) -> bool:
        """Whether a rank with un-started work has as much of it as the gate allows."""
        table = self._table
        if self._predictor.has_model:
            limit_us = self._limit_us if self._limit_us is not None else self._limit_steps * self._step_us(rank)
            if limit_us:
                # All of the time since the head became head counts, not only up to its own prediction: an engine that
                # fills a step with several prompts works on those behind it too. Measured: with the head's time capped,
                # gates stay shut on ranks that are nearly done, and mean TTFT is up to twice as long under load.
                since = table.head_since[rank]
                elapsed_us = 0.0 if since is None else max(0.0, (now - since) * 1e6)
                return table.pending_us[rank] - elapsed_us >= limit_us
        return table.queued_tokens[rank] >= self._limit_tokens

    def _step_us(self, rank: int) -> int:
        """The rank's decode step with what it decodes now, in microseconds: predicted, else measured; 0 if unknown."""
        table = self._table
        step_us = self._predictor.step_us(table.in_flight_decode[rank], table.ctx_tokens[rank])
        return table.step_us[rank] if step_us is None else step_us

    def _read_slots(self) -> None:
        """A rank's own limit is known once it has registered; another incarnation may have another."""
        self._infos = list(self._table.info)
        largest = max((capacity for capacity in self._table.kv_capacity_tokens if capacity < inf), default=0.0)
        # One more token than it need be: sums of floats may be rounded.
        self._kept_free = (1 - self._kv_limit) * largest + 1
        if self._max_in_flight is not None:
            self._slots = [self._max_in_flight] * self._table.size
        else:
            self._slots = [(info.max_num_seqs if info is not None else None) or _UNLIMITED for info in self._infos]
