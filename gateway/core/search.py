"""Which queued sequence a rank with an open gate may take, and which rank.

A search looks at few entries, however many are queued: only at what open ranks could ever take; each that finds no room
shuts those ranks for all behind it; and no more than `MAX_SKIPPED` are kept back for a better rank.
"""

from msgspec import Struct

from gateway.config.scheduling import Queue
from gateway.core.capacity import LanesOf, OpenLanes
from gateway.core.decisions import GATE_KV, Decision
from gateway.core.entry import Entry
from gateway.core.errors import Reason
from gateway.core.gate import Gate
from gateway.core.policy import Held, Policy
from gateway.core.queue import RequestQueue
from gateway.core.ranks import RankTable

MAX_SKIPPED = 16
"""How many requests behind a held one are tried."""
NEVER_FITS = (Reason.PROMPT_TOO_LONG, Reason.KV_TOO_SMALL)


class Impossible(Struct, frozen=True):
    """A queued sequence that no rank can ever take; it is still queued."""

    entry: Entry
    decision: Decision


class Choice(Struct, frozen=True):
    """A queued sequence and the rank that may take it; nothing is taken or charged yet."""

    entry: Entry
    decision: Decision
    rank: int


class _Kept:
    """What one search keeps back, and the first of it that an idle rank could take, with the gates that it found."""

    __slots__ = ("entries", "from_idle")

    def __init__(self) -> None:
        self.entries: set[Entry] = set()
        self.from_idle: tuple[Entry, bytes] | None = None


class Search:
    """Looks for what goes next. Marks since when an entry is kept back, and changes nothing else."""

    def __init__(self, queue: RequestQueue, gate: Gate, table: RankTable, policy: Policy, settings: Queue) -> None:
        self._queue = queue
        self._gate = gate
        self._table = table
        self._policy = policy
        self.configure(settings)

    def configure(self, settings: Queue) -> None:
        """Go by these settings."""
        self._hold_ratio = settings.hold_ratio or 0.0
        self._max_hold_s = settings.max_hold_s

    def first(self, now: float, gate: bytes) -> Choice | Impossible | None:
        """The first entry in service order that a rank may take, and that rank; None if everything has to wait."""
        kept, states = _Kept(), gate
        while 0 in states:
            found = self._walk(now, states, kept)
            if not isinstance(found, bytes):
                if found is not None:
                    return found
                break
            states = found
        if kept.from_idle is not None:
            # An idle rank is not kept waiting for a better one.
            entry, states = kept.from_idle
            return self.of(entry, now, states)
        return None

    def of(self, entry: Entry, now: float, gate: bytes) -> Choice | None:
        """The rank that may take this entry, queued or not; None if none may now."""
        found = self._decide(entry, now, gate, 0.0) if 0 in gate else None
        if not isinstance(found, Decision) or found.rank is None:
            return None
        return Choice(entry, found, found.rank)

    def refuse(self, entry: Entry, now: float) -> Impossible | None:
        """The entry, if no rank can ever take it."""
        arrived = entry.sequence.request.arrived
        decision = self._policy.refuse(
            now,
            prompt_tokens=entry.prompt_tokens,
            max_tokens=entry.max_tokens,
            priority=arrived.priority,
            pinned_rank=entry.pinned_rank,
            label=arrived.request_id,
            prefill_ms=entry.prefill_ms,
        )
        return Impossible(entry, decision) if decision is not None and decision.refusal in NEVER_FITS else None

    def _walk(self, now: float, states: bytes, kept: _Kept) -> Choice | Impossible | bytes | None:
        """Along the service order, until the gates are other ones for those behind: then these."""
        for entry in self._queue.in_order(now, OpenLanes(states)):
            if entry in kept.entries:
                continue
            found = self._decide(entry, now, states, self._hold_for(entry, now))
            if isinstance(found, Held):
                entry.held_since = now if entry.held_since is None else entry.held_since
                kept.entries.add(entry)
                if found.is_idle and kept.from_idle is None:
                    kept.from_idle = (entry, states)
                if len(kept.entries) > MAX_SKIPPED:
                    # Enough, but for ranks with nothing in flight: these take what they can.
                    return None if kept.from_idle is not None else self._only_idle(states)
            elif found is not None and found.rank is not None:
                return Choice(entry, found, found.rank)
            elif found is not None and found.refusal in NEVER_FITS:
                return Impossible(entry, found)
            else:
                left = _keep_room(entry, states)
                if left != states:
                    return left
        return None

    def _hold_for(self, entry: Entry, now: float) -> float:
        since = entry.held_since
        return 0.0 if since is not None and now - since >= self._max_hold_s else self._hold_ratio

    def _only_idle(self, states: bytes) -> bytes:
        """The gates, with those of ranks that have something in flight shut."""
        busy = self._table.in_flight
        return bytes([state or (GATE_KV if busy[rank] else 0) for rank, state in enumerate(states)])

    def _decide(self, entry: Entry, now: float, gate: bytes, hold_ratio: float) -> Decision | Held | None:
        sequence = entry.sequence
        arrived = sequence.request.arrived
        return self._policy.decide_gated(
            now,
            prompt_tokens=entry.prompt_tokens,
            max_tokens=entry.max_tokens,
            priority=arrived.priority,
            pinned_rank=entry.pinned_rank,
            label=arrived.request_id,
            prefill_ms=entry.prefill_ms,
            gate=gate,
            kv_fits=None if self._gate.kv_fits_everywhere(entry.prompt_tokens) else self._gate.kv_fits,
            hold_ratio=hold_ratio,
            tried_rank=sequence.attempt.rank if sequence.attempt is not None else None,
        )


def _keep_room(entry: Entry, gate: bytes) -> bytes:
    """The gates as those behind an entry that waits for room find them: the room is not theirs to take.

    Only ranks that can never take the entry stay open.
    """
    kept = bytearray(gate)
    for rank, state in enumerate(gate):
        if not state and entry.lane in LanesOf(rank):
            kept[rank] = GATE_KV
    return bytes(kept)
