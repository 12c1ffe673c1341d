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
from gateway.core.decisions import GATE_KV, Decision
from gateway.core.entry import Entry
from gateway.core.errors import Reason
from gateway.core.gate import GATE_REASONS, Gate
from gateway.core.policy import Held, Policy
from gateway.core.predictor import Predictor
from gateway.core.queue import RequestQueue
from gateway.core.ranks import RankTable
from gateway.core.request import Sequence
from gateway.core.room import Room, could_ever
from gateway.core.slo import SloTargets
from gateway.core.tenants import Account

MAX_SKIPPED = 16
"""How many requests behind a held one are tried."""
NEVER_FITS = (Reason.PROMPT_TOO_LONG, Reason.KV_TOO_SMALL)
_BATCHES = GATE_REASONS.index("batches")
_UNPINNED: Collection[int | None] = (None,)


class Placement(Struct, frozen=True):
    """Sequences to send to one rank now, with one decision each."""

    rank: int
    entries: list[Entry]
    decisions: list[Decision]
    reason: str


class Impossible(Struct, frozen=True):
    """A queued sequence that no rank can ever take; it is still queued."""

    entry: Entry
    decision: Decision


class Dispatcher:
    """The queue, the gates and the batches of one gateway."""

    def __init__(self, config: Config, table: RankTable, policy: Policy, predictor: Predictor) -> None:
        settings = config.scheduling
        self.queue = RequestQueue(settings.queue, SloTargets(config.slo))
        self.gate = Gate(settings.queue, table, predictor)
        self.batches: BatchesInFlight | None = None
        self._former: BatchFormer | None = None
        if settings.mode == "batch":
            self.batches = BatchesInFlight(table.size)
            self._former = BatchFormer(settings.batch, predictor)
        self._settings = settings
        self._table = table
        self._policy = policy
        self._predictor = predictor
        self._hold_ratio = settings.queue.hold_ratio or 0.0
        self._waits_for = settings.queue.hold_until_queued or 0
        self._next_number = 1
        self._due_at: float | None = None
        self.backlog_us = 0
        """Predicted prefill of everything that is queued."""

    def __len__(self) -> int:
        return len(self.queue)

    # ---- what is queued ----------------------------------------------------------------------

    def push(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence."""
        request = sequence.request
        account, prefill_us = request.account, request.prefill_us
        assert account is not None
        arrived = request.arrived
        service_tokens = len(arrived.prompt_token_ids) + min(
            arrived.sampling.max_tokens, self._table.expected_out_tokens()
        )
        number = sequence.queue_number
        if number is None:
            number = sequence.queue_number = self._next_number
            self._next_number += 1
        # A second attempt stands where the first one stood.
        entry = Entry(
            sequence,
            account,
            number,
            request.accepted_at,
            prefill_ms=prefill_us / 1e3,
            service_tokens=service_tokens,
        )
        sequence.entry = entry
        account.queued += 1
        self.backlog_us += prefill_us
        self.queue.push(entry, now)
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
        if not self.queue.size or self._waits_for:
            return None
        gate = self.gate_states(now)
        while True:
            found = self._pick(now, gate)
            if not isinstance(found, _Choice):
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

    def gate_states(self, now: float) -> bytes:
        """Per rank the state of its gate, as an index into `GATE_REASONS`; batches in flight included."""
        gate = self.gate.states(now)
        full = self.batches.at_limit(self._settings.batch.max_in_flight_batches) if self.batches is not None else None
        return _shut(gate, full) if full else gate

    def next_due(self) -> float | None:
        """When a collecting rank's window ends, if nothing else happens before."""
        return self._due_at

    def check(self, queued: list[Sequence]) -> None:
        """Assert that exactly these sequences are queued; for tests."""
        self.queue.check()
        entries = self.queue.entries()
        assert {id(entry) for entry in entries} == {id(sequence.entry) for sequence in queued}
        assert self.backlog_us == sum(entry.sequence.request.prefill_us for entry in entries)
        by_account: dict[Account, int] = {}
        for entry in entries:
            assert entry.is_queued
            by_account[entry.account] = by_account.get(entry.account, 0) + 1
        assert all(account.queued == count for account, count in by_account.items())

    def _pick(self, now: float, gate: bytes) -> "_Choice | Impossible | None":
        """The first entry in service order that a rank may take, and that rank."""
        if 0 not in gate:
            return None
        lanes = _lanes(gate) if self.queue.pinned else _UNPINNED
        states = gate
        held_from_idle: tuple[Entry, bytes] | None = None
        skipped = 0
        for entry in self.queue.in_order(now, lanes):
            if entry.pinned_rank is not None and states[entry.pinned_rank]:
                continue  # its rank's room is kept for one before it
            found = self._decide(entry, now, states, self._hold_for(entry, now))
            if isinstance(found, Held):
                entry.held_since = now if entry.held_since is None else entry.held_since
                if found.is_idle and held_from_idle is None:
                    held_from_idle = (entry, states)
                skipped += 1
                if skipped > MAX_SKIPPED:
                    break
            elif found is not None and found.rank is not None:
                return _Choice(entry, found, found.rank)
            elif found is not None and found.refusal in NEVER_FITS:
                return Impossible(entry, found)
            else:
                states = self._keep_room(entry, states)
                if 0 not in states:
                    break
        if held_from_idle is not None:
            entry, states = held_from_idle
            found = self._decide(entry, now, states, 0.0)
            if isinstance(found, Decision) and found.rank is not None:
                return _Choice(entry, found, found.rank)
        return None

    def _hold_for(self, entry: Entry, now: float) -> float:
        since = entry.held_since
        if since is not None and now - since >= self._settings.queue.max_hold_s:
            return 0.0
        return self._hold_ratio

    def _decide(self, entry: Entry, now: float, gate: bytes, hold_ratio: float) -> Decision | Held | None:
        arrived = entry.sequence.request.arrived
        return self._policy.decide_gated(
            now,
            prompt_tokens=entry.prompt_tokens,
            max_tokens=entry.max_tokens,
            priority=arrived.priority,
            pinned_rank=entry.pinned_rank,
            label=arrived.request_id,
            prefill_ms=entry.prefill_ms,
            gate=gate,
            kv_fits=None if self.gate.kv_fits_everywhere(entry.prompt_tokens) else self.gate.kv_fits,
            hold_ratio=hold_ratio,
        )

    def _keep_room(self, entry: Entry, gate: bytes) -> bytes:
        """The gates as those behind an entry that waits for room find them: the room is not theirs to take.

        Only ranks that can never take the entry stay open.
        """
        kept = bytearray(gate)
        for rank, state in enumerate(gate):
            if not state and entry.pinned_rank in (None, rank) and could_ever(self._table, rank, entry):
                kept[rank] = GATE_KV
        return bytes(kept)

    def _place(self, found: "_Choice", now: float) -> Placement:
        reason = "idle_rank" if not self._table.in_flight[found.rank] else "gate_open"
        decision = self._describe(found.decision, found.entry, now, reason)
        return Placement(found.rank, [found.entry], [decision], reason)

    def _form(self, found: "_Choice", former: BatchFormer, now: float) -> Placement | None:
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
        for entry in self.queue.in_order(now, (None, rank)):
            if is_behind:
                yield entry
            is_behind = is_behind or entry is head

    def _describe(self, decision: Decision, entry: Entry, now: float, reason: str) -> Decision:
        """Complete the record of an entry that goes to a rank now."""
        decision.queued_ms = (now - entry.enqueued_at) * 1e3
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


class _Choice(Struct, frozen=True):
    entry: Entry
    decision: Decision
    rank: int


def _lanes(gate: bytes) -> Collection[int | None]:
    """The pins that open ranks serve; None is for the sequences without one."""
    return {None, *[rank for rank, state in enumerate(gate) if not state]}


def _shut(gate: bytes, ranks: Collection[int]) -> bytes:
    """The gates with those of the ranks shut, which have enough batches or collect for their next one."""
    states = bytearray(gate)
    for rank in ranks:
        states[rank] = states[rank] or _BATCHES
    return bytes(states)
