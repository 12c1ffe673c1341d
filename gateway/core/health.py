"""Which ranks are well: the silence rule, the way back of ranks that were lost by it, and ejection.

* Silence (`core/silence.py`): a rank that says nothing although it has work is SUSPECT first, gets no new work, and is
  READY again with its next message; later it is lost, and its work goes elsewhere. Its process may live all the same:
  its sockets are kept, and its next message begins its next incarnation.
* The way back: then it is JOINING until none of its earlier rows has come for `quiet_s`. Those are late rows: they were
  released, go to nobody, and are aborted again. An engine that has nothing to say is asked (`core/probes.py`).
* Ejection (`core/ejection.py`): a rank that fails again and again is EJECTED: it ends what it has and gets nothing new
  for a while.

This module only moves ranks; what a loss means for their work is `Fleet`'s.
"""

from collections.abc import Sequence

from gateway.config.schema import Config
from gateway.core.columns import resize
from gateway.core.counters import Counters
from gateway.core.effects import Effect
from gateway.core.ejection import Ejection
from gateway.core.moves import Moves
from gateway.core.probes import Probes
from gateway.core.ranks import RankState, RankTable
from gateway.core.silence import Silence
from gateway.core.strays import probe_prefix

MAX_JOINING_S = 30.0
"""A rank that still sends earlier rows then is READY anyway: they are strays like any others."""
SEND_FAILURE_SPACING_S = 0.2
"""Refused sends that are closer together have one cause."""
_READY, _LOST, _JOINING, _SUSPECT = RankState.READY, RankState.LOST, RankState.JOINING, RankState.SUSPECT


class Health:
    """The state of health of all ranks."""

    def __init__(self, config: Config, nonce: str, table: RankTable, moves: Moves, counters: Counters) -> None:
        self._table = table
        self._moves = moves
        self._counters = counters
        self._probe_prefix = probe_prefix(nonce)
        self._silence = Silence(table, config.failure.silence)
        self._ejection = Ejection(config, table)
        self._probes = Probes(config, nonce, table, counters)
        size = table.size
        self._is_kept = [False] * size
        """Lost for its silence, and the link has given its sockets their next incarnation."""
        self._is_held = [False] * size
        """An operator drains it, until it is undrained or another process takes its place."""
        self._joined_at = [0.0] * size
        self._quiet_since = [0.0] * size
        self._send_failed_at: list[float | None] = [None] * size
        self._last_cause = [""] * size
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by other settings, for as many ranks as the table has now."""
        size = self._table.size
        silence = config.failure.silence
        self._has_silence = silence is not None
        self._quiet_s = silence.quiet_s if silence is not None else 0.0
        self._silence.configure(silence)
        self._ejection.configure(config)
        self._probes.resize()
        resize(self._is_kept, size, bool)
        resize(self._is_held, size, bool)
        resize(self._joined_at, size, float)
        resize(self._quiet_since, size, float)
        resize(self._send_failed_at, size, lambda: None)
        resize(self._last_cause, size, str)

    # ---- what ranks do -----------------------------------------------------------------------

    def is_kept(self, rank: int) -> bool:
        """Whether a lost rank's sockets are kept, so that it may be heard."""
        return self._is_kept[rank]

    def heard(self, rank: int, wire_ids: Sequence[str], now: float, effects: list[Effect]) -> None:
        """A message of the rank's current incarnation, with rows of these attempts. Once per batch."""
        table = self._table
        # Whoever takes messages shows by any of its own that it lives.
        if table.is_blocked[rank]:
            if not self._silence.heard(rank):
                return
        else:
            table.silent_s[rank] = 0.0
            self._silence.most_queued[rank] = 0
        if self._probes.out[rank] is not None:
            self._probes.settled(rank)
        state = table.state[rank]
        if state is _READY:
            return
        if state is _SUSPECT:
            self._moves.move(rank, "heard", "heard again", now, effects)
        elif state is _LOST:
            self._is_kept[rank] = False
            self._joined_at[rank] = self._quiet_since[rank] = now
            self._moves.move(rank, "heard", "heard again", now, effects)
        if self._table.state[rank] is _JOINING and not all(id_.startswith(self._probe_prefix) for id_ in wire_ids):
            self._quiet_since[rank] = now

    def took(self, rank: int) -> None:
        """The rank's socket takes messages again."""
        self._silence.took(rank)

    def succeeded(self, rank: int) -> None:
        """The rank has completed a request."""
        if self._table.failures[rank]:
            self._ejection.clear(rank)

    def failed(self, rank: int, cause: str, now: float, effects: list[Effect], request: int | None = None) -> None:
        """The rank failed; `request` is whose request it was, which counts once in a row."""
        if self._ejection.fail(rank, request):
            self._counters.rank_failures[rank] += 1
            self._last_cause[rank] = cause
            self._eject_if_due(rank, now, effects)

    def send_failed(self, rank: int, now: float, effects: list[Effect]) -> None:
        """The link could not reach the rank with a request."""
        last = self._send_failed_at[rank]
        self._send_failed_at[rank] = now
        if last is None or now - last >= SEND_FAILURE_SPACING_S:
            self.failed(rank, "unreachable", now, effects)

    # ---- their coming and going --------------------------------------------------------------

    def joined(self, rank: int, now: float, effects: list[Effect]) -> None:
        """The rank has a new incarnation."""
        self.unreachable(rank)
        self._joined_at[rank] = now
        self._eject_if_due(rank, now, effects)

    def blame(self, rank: int, now: float, effects: list[Effect], *, is_silent: bool) -> None:
        """The rank is LOST through its own doing."""
        if is_silent:
            self._counters.silence_losses[rank] += 1
            self.failed(rank, "silence", now, effects)
        elif now - self._joined_at[rank] < self._ejection.young_s:
            self.failed(rank, "lost soon after joining", now, effects)

    def renewed(self, rank: int, now: float, effects: list[Effect]) -> None:
        """A lost rank's kept sockets have their next incarnation: it is asked for a sign of life."""
        self.unreachable(rank)
        self._is_kept[rank] = True
        self._probes.ask(rank, now, effects)

    def unreachable(self, rank: int) -> None:
        """What was kept of the rank is gone, or replaced."""
        self._is_kept[rank] = False
        self._silence.begin(rank)
        self._probes.settled(rank)

    def is_held(self, rank: int) -> bool:
        """Whether an operator drains the rank, wherever it is."""
        return self._is_held[rank]

    def hold(self, rank: int, *, is_held: bool) -> None:
        """Whether an operator wants no work on the rank; one that is away is DRAINING when it is back."""
        self._is_held[rank] = is_held

    def forgive(self, rank: int) -> None:
        """An operator says that the rank is well."""
        self._ejection.clear(rank)

    def forget(self, rank: int) -> None:
        """The rank is configured no more."""
        self.unreachable(rank)
        self._ejection.clear(rank)
        self._is_held[rank] = False
        self._send_failed_at[rank] = None

    # ---- time --------------------------------------------------------------------------------

    def step(self, now: float, effects: list[Effect]) -> list[int]:
        """Let time pass. Returns the ranks that have been silent for too long: to be lost."""
        overdue, over = self._silence.step(now)
        for rank in overdue:
            if self._table.state[rank] is _READY:
                self._counters.suspects[rank] += 1
                self._moves.move(rank, "silent", self.silence(rank), now, effects)
        if self._table.state.count(_READY) < self._table.size:
            if not self._has_silence:
                self._let_go(now, effects)
            self._ask(now, effects)
            self._settle(now, effects)
            for rank in self._ejection.over(now):
                self._moves.move(rank, "returned", "its ejection is over", now, effects)
            self.rescue(now, effects)
        return over

    def silence(self, rank: int) -> str:
        """What is wrong with a rank that `step` found."""
        return self._silence.cause(rank)

    def rescue(self, now: float, effects: list[Effect]) -> None:
        """A group without a READY rank takes an ejected one back: one that may fail is better than none."""
        for rank in self._ejection.needed():
            self._moves.move(rank, "returned", "no other rank of its group is READY", now, effects)

    def _let_go(self, now: float, effects: list[Effect]) -> None:
        """The silence rule is off, and nobody is suspected any more."""
        for rank, state in enumerate(self._table.state):
            if state is _SUSPECT:
                self._moves.move(rank, "heard", "the silence rule is off", now, effects)

    def _ask(self, now: float, effects: list[Effect]) -> None:
        states = self._table.state
        for rank, state in enumerate(states):
            if state is _SUSPECT:
                # An answer may be lost as well as its question: who owes one is asked again.
                is_owing = self._probes.is_out(rank)
                is_due = not self._table.in_flight[rank] and (not is_owing or self._probes.is_due(rank, now))
            else:
                is_due = state is _LOST and self._is_kept[rank] and self._probes.is_due(rank, now)
            if is_due:
                self._probes.ask(rank, now, effects)

    def _settle(self, now: float, effects: list[Effect]) -> None:
        """Joining ranks that are quiet, or have had their time, are READY."""
        for rank, state in enumerate(self._table.state):
            if state is not _JOINING:
                continue
            is_quiet = now - self._quiet_since[rank] >= self._quiet_s
            if not is_quiet and now - self._joined_at[rank] < MAX_JOINING_S:
                continue
            cause = "no earlier rows any more" if is_quiet else "although it still sends earlier rows"
            self._moves.move(rank, "held" if self._is_held[rank] else "settled", cause, now, effects)
            self._eject_if_due(rank, now, effects)

    def _eject_if_due(self, rank: int, now: float, effects: list[Effect]) -> None:
        if not self._ejection.is_due(rank):
            return
        if not self._ejection.has_room(rank):
            self._counters.ejections_capped += 1
            return
        self._counters.ejections[rank] += 1
        duration_s = self._ejection.begin(rank, now)
        failures, last = self._table.failures[rank], self._last_cause[rank]
        cause = f"for {duration_s:g} s: {failures} failures in a row, the last: {last}"
        self._moves.move(rank, "ejected", cause, now, effects)
