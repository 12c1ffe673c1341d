"""The clock of the silence rule: how long a rank has said nothing although it had work.

An idle engine is silent, and so is one in a long prefill: neither sends anything before it has a token. So only time
with work in flight (or with messages that the rank does not take) counts, any message sets the clock back, and prompts
without a token get time of their own, by the most of them that there was since the last message: what was aborted
meanwhile has cost the rank its time all the same. Time is added step by step, little of it at once: a gateway that
stood still itself has heard nobody, which says nothing about the ranks. Little counts in particular of the time up to the
first step that finds work, as steps are rare while there is none.

A rank that takes no messages and has no work of ours owes that it takes them: what it says meanwhile, of other gateways'
work, doesn't count.
"""

# ruff: noqa: PLR1730 - a comparison costs a tenth of a call of `max`, and this runs for every rank at every tick

from math import inf

from gateway.config.failure import Silence as Settings
from gateway.core.columns import resize
from gateway.core.ranks import SERVING, RankState, RankTable

MAX_STEP_S = 1.0
FIRST_STEP_S = 0.05
"""At most so much is added when nobody owed anything at the step before."""
_STEPS = 4
"""At least so many steps lead to a loss, so that what waits in the sockets is read before."""
_SUSPECT = RankState.SUSPECT
_SILENT = "silent for {:.1f} s with work in flight"


class Silence:
    """Owns the column `silent_s`."""

    def __init__(self, table: RankTable, settings: Settings | None) -> None:
        self._table = table
        self.most_queued = [0] * table.size
        self._last_step_at: float | None = None
        self._was_owed = True
        self.configure(settings)

    def configure(self, settings: Settings | None) -> None:
        """Go by other settings, for as many ranks as the table has now; None switches the rule off."""
        self._after_s = settings.after_s if settings is not None else inf
        self._tokens_per_s = settings.prefill_tokens_per_s if settings is not None else 1
        self._max_step_s = min(MAX_STEP_S, self._after_s / _STEPS)
        resize(self.most_queued, self._table.size, int)

    def heard(self, rank: int) -> bool:
        """The rank sent something. False if that is no sign of life."""
        if self._is_deaf(rank):
            return False
        self.begin(rank)
        return True

    def took(self, rank: int) -> None:
        """The rank takes messages again; with work, it owes more than that."""
        if not self._table.in_flight[rank]:
            self.begin(rank)

    def cause(self, rank: int) -> str:
        """What the rank did not do, and for how long."""
        silent_s = self._table.silent_s[rank]
        return f"took no messages for {silent_s:.1f} s" if self._is_deaf(rank) else _SILENT.format(silent_s)

    def begin(self, rank: int) -> None:
        """The rank's clock begins anew."""
        self._table.silent_s[rank] = 0.0
        self.most_queued[rank] = 0

    def step(self, now: float) -> tuple[list[int], list[int]]:
        """Let time pass. Returns the ranks that are silent for half of their time, and those for all of it."""
        last, self._last_step_at = self._last_step_at, now
        overdue: list[int] = []
        over: list[int] = []
        if last is None or self._after_s == inf:
            return overdue, over
        elapsed_s = min(now - last, self._max_step_s if self._was_owed else min(self._max_step_s, FIRST_STEP_S))
        table, most_queued = self._table, self.most_queued
        silent_s, queued_tokens, half_s = table.silent_s, table.queued_tokens, self._after_s / 2
        is_owed = False
        for rank, in_flight in enumerate(table.in_flight):
            if not in_flight and not self._owes_a_sign(rank):
                continue
            is_owed = True
            silent_s[rank] += elapsed_s
            if queued_tokens[rank] > most_queued[rank]:
                most_queued[rank] = queued_tokens[rank]
            if silent_s[rank] < half_s:
                continue
            own_s = silent_s[rank] - self.allowance_s(rank)
            if own_s >= self._after_s:
                over.append(rank)
            elif own_s >= half_s:
                overdue.append(rank)
        self._was_owed = is_owed
        return overdue, over

    def _owes_a_sign(self, rank: int) -> bool:
        """Whether a rank without work owes a sign of life: it takes no messages, or it is suspect and was asked."""
        return self._table.state[rank] is _SUSPECT or self._is_deaf(rank)

    def _is_deaf(self, rank: int) -> bool:
        table = self._table
        return table.is_blocked[rank] and not table.in_flight[rank] and table.state[rank] in SERVING

    def allowance_s(self, rank: int) -> float:
        """Time that the prompts without a token may take."""
        return self.most_queued[rank] / self._tokens_per_s
