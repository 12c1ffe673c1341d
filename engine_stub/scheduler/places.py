"""Where sequences are: every live one is waiting, prefilling or decoding, and the last two hold a slot."""

from collections import OrderedDict

from engine_stub.scheduler.sequence import Phase, Sequence
from engine_stub.scheduler.slots import Slots


class Places:
    """The queue and the slots of one rank. `waiting` is in order of service, the others in order of entry."""

    def __init__(self) -> None:
        self.live: dict[str, Sequence] = {}
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.prefilling: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}
        self.slots = Slots()

    @property
    def active_count(self) -> int:
        """Sequences that hold a slot."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def active(self) -> list[Sequence]:
        """The sequences that hold a slot."""
        return [*self.prefilling.values(), *self.decoding.values()]

    @property
    def head(self) -> Sequence:
        """The sequence that is served next; there must be one."""
        return next(iter(self.waiting.values()))

    def enter(self, sequence: Sequence) -> None:
        """A new sequence waits at the end."""
        self.live[sequence.id] = self.waiting[sequence.id] = sequence

    def start_head(self) -> Sequence:
        """The head gets a slot and begins to prefill."""
        _, sequence = self.waiting.popitem(last=False)
        sequence.slot = self.slots.take()
        sequence.phase = Phase.PREFILLING
        self.prefilling[sequence.id] = sequence
        return sequence

    def start_decoding(self, sequence: Sequence) -> None:
        """All of a sequence's text is computed."""
        sequence.phase = Phase.DECODING
        self.decoding[sequence.id] = self.prefilling.pop(sequence.id)

    def requeue(self, sequence: Sequence) -> None:
        """A sequence loses its slot and is served next."""
        self._leave_slot(sequence)
        sequence.phase = Phase.WAITING
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def leave(self, sequence: Sequence) -> None:
        """A sequence is over, wherever it was."""
        if sequence.phase is Phase.WAITING:
            del self.waiting[sequence.id]
        else:
            self._leave_slot(sequence)
        del self.live[sequence.id]
        sequence.phase = Phase.ENDED

    def check(self, active_cap: int) -> None:
        """Assert that every live id is in exactly one place and every active one has a slot of its own."""
        active = self.active
        assert len(active) <= active_cap
        assert self.live.keys() == self.waiting.keys() | self.prefilling.keys() | self.decoding.keys()
        assert len(self.live) == len(active) + len(self.waiting)
        assert len({sequence.slot for sequence in active}) == len(active)
        assert all(0 <= sequence.slot < self.slots.grown for sequence in active)
        for sequence in self.waiting.values():
            assert not sequence.blocks
            assert not sequence.promised
        for sequence in self.decoding.values():
            assert sequence.computed == sequence.prompt_len + sequence.generated - 1

    def _leave_slot(self, sequence: Sequence) -> None:
        place = self.decoding if sequence.phase is Phase.DECODING else self.prefilling
        del place[sequence.id]
        self.slots.give_back(sequence.slot)
        sequence.slot = -1
