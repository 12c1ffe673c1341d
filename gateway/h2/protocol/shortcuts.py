"""The frames of ordinary calls, each in one step.

Every method takes a frame and leaves the connection as `Inbound` would, or returns False and has changed nothing: then
the frame is not as ordinary as it seemed, and goes to `Inbound`, which knows all cases and all errors. What arrives
together becomes one event: a request with its body and its end.
"""

from collections.abc import Callable

from gateway.h2.protocol import frames
from gateway.h2.protocol.events import DataReceived, RequestEnded, RequestStarted
from gateway.h2.protocol.frames import END_HEADERS, END_STREAM
from gateway.h2.protocol.heads import HeadMemo
from gateway.h2.protocol.inbound import Inbound
from gateway.h2.protocol.limits import UPDATES_PER_FRAME, Budgets, Limits
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.settings import MAX_WINDOW_BYTES
from gateway.h2.protocol.streams import Stream

Take = Callable[[int, int, bytes], bool]
"""Flags, stream and payload of a frame."""

_WINDOW_UPDATE_BYTES = 4


class Shortcuts:
    """Beside `Inbound`, whose state this is."""

    __slots__ = ("_budgets", "_inbound", "_limits", "_memo", "_out", "fresh")

    def __init__(self, inbound: Inbound, out: Outbound, limits: Limits, budgets: Budgets, memo: HeadMemo) -> None:
        self._inbound = inbound
        self._out = out
        self._limits = limits
        self._budgets = budgets
        self._memo = memo
        # Requests whose event nobody has seen yet, and may still say more. To be emptied when the events are looked at,
        # and when another may come from elsewhere: what follows is told by events of its own.
        self.fresh: dict[int, RequestStarted] = {}

    def by_kind(self) -> dict[int, Take]:
        """The methods by type of frame."""
        return {frames.DATA: self.data, frames.HEADERS: self.headers, frames.WINDOW_UPDATE: self.window_update}

    def headers(self, flags: int, number: int, block: bytes) -> bool:
        """A request whose head is known."""
        inbound, limits = self._inbound, self._limits
        streams = inbound.streams
        if (
            flags != END_HEADERS
            or number <= inbound.last_stream_id
            or not number & 1
            or not inbound.decoder.is_stateless
            or inbound.block is not None
            or inbound.is_final
            or len(streams) >= limits.max_streams
        ):
            return False
        known = self._memo.heads.get(block) or self._memo.find(block)
        if known is None:
            return False
        head, timeout = known
        inbound.last_stream_id = number
        self._budgets.updates += UPDATES_PER_FRAME
        out = self._out
        stream = streams[number] = Stream(number, out, out.peer.initial_window_bytes, limits.stream_window_bytes)
        stream.expected_bytes = head.content_length
        event = self.fresh[number] = RequestStarted(stream, head, timeout)
        inbound.events.append(event)
        return True

    def data(self, flags: int, number: int, payload: bytes) -> bool:
        """A piece of a body, or the whole of it."""
        inbound, size = self._inbound, len(payload)
        stream = inbound.streams.get(number)
        if (
            stream is None
            or flags > END_STREAM
            or not (size or flags)
            or stream.has_peer_ended
            or stream.expected_bytes is not None
            or inbound.block is not None
            or size > stream.receive_left
        ):
            return False
        inbound.credit = credit = inbound.credit + size
        if credit * 2 >= self._limits.connection_window_bytes:
            inbound.give_back(0)
        stream.receive_left -= size
        stream.received_bytes += size
        if flags:
            stream.has_peer_ended = True
        event = self.fresh.get(number)
        if event is not None and not (size and event.data):
            if size:
                event.data = payload
            event.is_ended = stream.has_peer_ended
        elif size:
            if event is not None:
                del self.fresh[number]
            inbound.events.append(DataReceived(stream, payload, stream.has_peer_ended))
        else:
            inbound.events.append(RequestEnded(stream))
        return True

    def window_update(self, flags: int, number: int, payload: bytes) -> bool:  # noqa: ARG002 - it has no flags
        """More room for what we send, when nothing waits for it."""
        out, inbound = self._out, self._inbound
        increment = int.from_bytes(payload)
        if (
            len(payload) != _WINDOW_UPDATE_BYTES
            or not 0 < increment <= MAX_WINDOW_BYTES
            or out.turns
            or inbound.block is not None
            or not inbound.decoder.is_stateless
        ):
            return False
        stream = inbound.streams.get(number)
        if number and (stream is None or stream.backlog):
            return False
        where = stream or out
        if where.send_window + increment > MAX_WINDOW_BYTES:
            return False
        self._budgets.window_update()
        where.send_window += increment
        return True
