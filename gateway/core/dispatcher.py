"""Modes queue and batch: which queued sequence goes to which rank next, and when none does.

Late binding: a rank gets a sequence only while its gate is open, so the order of the queue stays the gateway's to
decide until the last moment. Work-conserving: a rank with nothing in flight never waits while a sequence that it can
take is queued. Nothing here charges or sends: the pump does both for each placement before it asks for the next.
"""

from collections.abc import Collection, Iterator

from msgspec import Struct, structs

from gateway.config.schema import Config
from gateway.core.batcher import BatchFormer
from gateway.core.batches_in_flight import BatchesInFlight
from gateway.core.capacity import LanesOf, Reach
from gateway.core.decisions import Decision
from gateway.core.entry import Entry, Lane, Narrow
from gateway.core.errors import GatewayError
from gateway.core.gate import GATE_REASONS, Gate
from gateway.core.policy import Policy
from gateway.core.predictor import Predictor
from gateway.core.queue import RequestQueue
from gateway.core.ranks import RankTable
from gateway.core.request import Request, Sequence
from gateway.core.room import Room
from gateway.core.search import Choice, Impossible, Search
from gateway.core.slo import SloTargets
from gateway.core.tenants import Account

_BATCHES = GATE_REASONS.index("batches")


class Placement(Struct, frozen=True):
    """Sequences to send to one rank now, with one decision each."""

    rank: int
    entries: list[Entry]
    decisions: list[Decision]
    reason: str


class Dispatcher:
    """The queue, the gates and the batches of one gateway."""

    def __init__(self, config: Config, table: RankTable, policy: Policy, predictor: Predictor) -> None:
        settings = config.scheduling
        self.queue = RequestQueue(settings.queue, SloTargets(config.slo))
        self.gate = Gate(settings.queue, table, predictor)
        self.reach = Reach(table)
        self._search = Search(self.queue, self.gate, table, policy, settings.queue)
        self.batches: BatchesInFlight | None = None
        self._former: BatchFormer | None = None
        if settings.mode == "batch":
            self.batches = BatchesInFlight(table.size)
            self._former = BatchFormer(settings.batch, predictor)
        self._settings = settings
        self._table = table
        self._predictor = predictor
        self._waits_for = settings.queue.hold_until_queued or 0
        self._next_number = 1
        self._due_at: float | None = None
        self._hopeless: list[Entry] = []
        """Entries that no rank could ever take, by what ranks reported lately."""
        self.backlog_us = 0
        """Predicted prefill of everything that is queued."""

    def configure(self, config: Config) -> None:
        """Go by other settings of the same mode, for as many ranks as the table has now. What waits goes on waiting."""
        settings = self._settings = config.scheduling
        self.queue.configure(settings.queue, SloTargets(config.slo))
        self.gate.configure(settings.queue)
        self._search.configure(settings.queue)
        if self.batches is not None:
            self.batches.resize(self._table.size)
            self._former = BatchFormer(settings.batch, self._predictor)

    @property
    def no_rank_wait_s(self) -> float:
        """How long an entry waits while no rank is READY that could ever take it."""
        return self._settings.queue.no_rank_wait_s

    def __len__(self) -> int:
        return len(self.queue)

    # ---- what is queued ----------------------------------------------------------------------

    def push(self, sequence: Sequence, now: float, loss: GatewayError | None = None) -> None:
        """Queue a sequence; `loss` is why it has lost its rank, if it had one."""
        request = sequence.request
        entry = self._entry_of(sequence)
        entry.loss = loss
        entry.lane = self._lane_of(entry)
        sequence.entry = entry
        entry.account.queued += 1
        self.backlog_us += request.prefill_us
        # Another attempt has its time in the queue once more. Who waited for another one's answer has waited already.
        self.queue.push(entry, now, since=now if sequence.attempts else request.accepted_at)
        if self.queue.size >= self._waits_for:
            self._waits_for = 0

    def forget(self, sequence: Sequence) -> None:
        """A queued sequence ended."""
        entry = sequence.entry
        if entry is not None:
            self.queue.remove(entry)
            self._left(entry)

    def taken(self, entry: Entry) -> None:
        """A placement's entry goes to its rank."""
        self.queue.taken(entry)
        self._left(entry)

    def expired(self, now: float) -> list[Entry]:
        """Entries whose time in the queue is over; they are out of it."""
        entries = self.queue.expired(now)
        for entry in entries:
            self._left(entry)
        return entries

    def _left(self, entry: Entry) -> None:
        entry.sequence.entry = None
        entry.account.queued -= 1
        self.backlog_us -= entry.sequence.request.prefill_us

    # ---- what goes next ----------------------------------------------------------------------

    def next(self, now: float) -> Placement | Impossible | None:
        """The next placement, or None when everything that is queued has to wait."""
        self._due_at = None
        if not self.queue.size:
            return None
        hopeless = self._next_hopeless(now)
        if hopeless is not None or self._waits_for:
            return hopeless
        gate = self.gate_states(now)
        while True:
            found = self._search.first(now, gate)
            if not isinstance(found, Choice):
                return found
            if self._former is None:
                return self._place(found, now)
            batch = self._form(found, self._former, now)
            if batch is not None:
                return batch
            # That rank collects for its next batch; another one may be idle.
            gate = _shut(gate, (found.rank,))
            due_at = self._former.next_due(self._followers(found.entry, found.rank, now), now)
            if due_at is not None:
                self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)

    def place(self, sequence: Sequence, now: float) -> Placement | None:
        """Where a sequence that is not queued can go at once; None if it would have to wait."""
        if self._waits_for:
            return None
        found = self._search.of(self._entry_of(sequence), now, self.gate_states(now))
        return self._place(found, now) if found is not None else None

    def gate_states(self, now: float) -> bytes:
        """Per rank the state of its gate, as an index into `GATE_REASONS`; batches in flight included."""
        gate = self.gate.states(now)
        full = self.batches.at_limit(self._settings.batch.max_in_flight_batches) if self.batches is not None else None
        return _shut(gate, full) if full else gate

    def next_due(self) -> float | None:
        """When a collecting rank's window ends, if nothing else happens before."""
        return self._due_at if self.queue.size else None

    def check(self, queued: list[Sequence]) -> None:
        """Assert that exactly these sequences are queued; for tests."""
        self.queue.check()
        entries = self.queue.entries()
        assert {id(entry) for entry in entries} == {id(sequence.entry) for sequence in queued}
        if self.reach.is_current:
            lane_of = self.reach.lane
            assert all(e.lane == lane_of(e.prompt_tokens, e.max_tokens, e.pinned_rank) for e in entries)
        assert self.backlog_us == sum(entry.sequence.request.prefill_us for entry in entries)
        by_account: dict[Account, int] = {}
        for entry in entries:
            assert entry.is_queued
            by_account[entry.account] = by_account.get(entry.account, 0) + 1
        assert all(account.queued == count for account, count in by_account.items())

    def without_rank(self, now: float) -> list[Entry]:
        """Entries that have waited for `no_rank_wait_s` while no rank was READY that could ever take them."""
        wait_s, found = self.no_rank_wait_s, list[Entry]()
        if all(since is None for since in self._table.away_since):
            return found
        for lane, entries in self.queue.by_lane():
            since = self.reach.away_since(lane)
            if since is None or now - since < wait_s:
                continue
            for entry in entries:
                if now - entry.enqueued_at < wait_s:
                    break
                if now - entry.queued_at >= wait_s:
                    found.append(entry)
        return found

    def away_since(self, request: Request) -> float | None:
        """Since when no rank is READY that could ever take the request; None while one is."""
        arrived = request.arrived
        lane = self.reach.lane(len(arrived.prompt_token_ids), arrived.sampling.max_tokens, arrived.pinned_rank)
        return self.reach.away_since(lane)

    def _entry_of(self, sequence: Sequence) -> Entry:
        request = sequence.request
        account, arrived = request.account, request.arrived
        assert account is not None
        out_tokens = min(arrived.sampling.max_tokens, self._table.expected_out_tokens())
        if sequence.queue_number is None:
            sequence.queue_number = self._next_number
            self._next_number += 1
        # A second attempt stands where the first one stood.
        return Entry(
            sequence,
            account,
            sequence.queue_number,
            request.accepted_at,
            prefill_ms=request.prefill_us / 1e3,
            service_tokens=len(arrived.prompt_token_ids) + out_tokens,
        )

    def _lane_of(self, entry: Entry) -> Lane:
        lane = self.reach.lane(entry.prompt_tokens, entry.max_tokens, entry.pinned_rank)
        if lane == Narrow(0):
            self._hopeless.append(entry)
        return lane

    def _next_hopeless(self, now: float) -> Impossible | None:
        """The next entry that no rank can ever take, now that ranks may have become smaller."""
        if not self.reach.is_current:
            self.reach.refresh()
            self._hopeless.clear()
            self.queue.relane(self._lane_of)
        while self._hopeless:
            entry = self._hopeless[-1]
            found = self._search.refuse(entry, now) if entry.is_queued else None
            if found is not None:
                return found
            self._hopeless.pop()
        return None

    def _place(self, found: Choice, now: float) -> Placement:
        reason = "idle_rank" if not self._table.in_flight[found.rank] else "gate_open"
        decision = self._describe(found.decision, found.entry, now, reason)
        return Placement(found.rank, [found.entry], [decision], reason)

    def _form(self, found: Choice, former: BatchFormer, now: float) -> Placement | None:
        rank = found.rank
        room = Room(self._table, self.gate, rank, found.entry)
        formed = former.form(
            self._followers(found.entry, rank, now), now, is_idle=not self._table.in_flight[rank], fits=room.takes
        )
        if formed is None:
            return None
        decisions = [found.decision]
        decisions += [self._of_member(found.decision, entry, now) for entry in formed.entries[1:]]
        for entry, decision in zip(formed.entries, decisions, strict=True):
            self._describe(decision, entry, now, formed.reason)
        return Placement(rank, formed.entries, decisions, formed.reason)

    def _followers(self, head: Entry, rank: int, now: float) -> Iterator[Entry]:
        """The head, and what follows it in service order and may go to the same rank."""
        yield head
        is_behind = False
        for entry in self.queue.in_order(now, LanesOf(rank)):
            if is_behind:
                yield entry
            is_behind = is_behind or entry is head

    def _describe(self, decision: Decision, entry: Entry, now: float, reason: str) -> Decision:
        """Complete the record of an entry that goes to a rank now."""
        decision.queued_ms = (now - entry.queued_at) * 1e3
        decision.queue_depth = self.queue.size
        decision.dispatch_reason = reason
        if self._predictor.has_model:
            decision.predicted_ms = entry.prefill_ms
        return decision

    def _of_member(self, decision: Decision, entry: Entry, now: float) -> Decision:
        """The record of a batch member: it shares the head's choice, not its numbers."""
        arrived = entry.sequence.request.arrived
        prompt, max_tokens = entry.prompt_tokens, entry.max_tokens
        request = (now, prompt, 0, prompt, max_tokens, arrived.priority, entry.prefill_ms)
        return structs.replace(decision, label=arrived.request_id, request=request, pinned=entry.pinned_rank)


def _shut(gate: bytes, ranks: Collection[int]) -> bytes:
    """The gates with those of the ranks shut, which have enough batches or collect for their next one."""
    states = bytearray(gate)
    for rank in ranks:
        states[rank] = states[rank] or _BATCHES
    return bytes(states)
