"""Requests that have arrived and wait for the next step, and aborts that came before their request."""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from engine_stub.wire.codec import Add

ABORT_MEMORY = 4096
"""Ids of early aborts that are remembered; the oldest goes first."""
ABORT_MEMORY_S = 60.0


class Inbox:
    """First in, first out; an abort takes a request out again. `now` is monotonic, in s."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Add] = OrderedDict()
        self._early_aborts: OrderedDict[str, float] = OrderedDict()

    @property
    def ids(self) -> AbstractSet[str]:
        """Ids that wait."""
        return self._waiting.keys()

    def put(self, message: Add) -> None:
        """Let a request wait; the caller has checked its id."""
        self._waiting[message.request.id] = message

    def remove(self, request_id: str) -> bool:
        """Take a request out; False when it isn't there."""
        return self._waiting.pop(request_id, None) is not None

    def drain(self) -> Iterator[Add]:
        """Take everything out, oldest first."""
        while self._waiting:
            yield self._waiting.popitem(last=False)[1]

    def remember_abort(self, request_id: str, now: float) -> None:
        """An abort came for an id that is not here (yet)."""
        self._early_aborts[request_id] = now + ABORT_MEMORY_S
        if len(self._early_aborts) > ABORT_MEMORY:
            self._early_aborts.popitem(last=False)

    def was_aborted(self, request_id: str, now: float) -> bool:
        """Whether an abort came before its request; asked once, then forgotten."""
        expiry = self._early_aborts.pop(request_id, None)
        return expiry is not None and expiry > now
