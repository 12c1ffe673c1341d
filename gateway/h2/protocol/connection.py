"""One HTTP/2 connection of a server: bytes in, events out; commands in, bytes out.

Nothing here raises at its caller: a peer that breaks a rule of the connection is answered with a GOAWAY and reported
as `ConnectionFailed`, one that breaks a rule of a stream with a RST_STREAM and `StreamReset`.
"""

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError, Http2StreamError
from gateway.h2.protocol.events import ConnectionFailed, Event, StreamDrained, StreamReset
from gateway.h2.protocol.frames import HEAD_BYTES, MAX_FRAME_BYTES, MAX_STREAM_ID, TRAILERS_HEADS, unpack_head
from gateway.h2.protocol.heads import HeadMemo
from gateway.h2.protocol.inbound import Inbound
from gateway.h2.protocol.limits import Budgets, Limits
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.reader import FrameReader, check_shape
from gateway.h2.protocol.settings import DEFAULT_WINDOW_BYTES
from gateway.h2.protocol.shortcuts import Shortcuts
from gateway.h2.protocol.streams import Stream
from gateway.h2.protocol.timers import Timers

_DRAIN_PING = b"drained?"
_KEEPALIVE_PING = b"alive?  "
_DRAIN_PING_S = 1.0


class Connection:
    """The state of one connection. `now` is in seconds of a clock that never goes back."""

    def __init__(self, limits: Limits, now: float, memo: HeadMemo) -> None:
        self.timers = Timers(limits, now)
        # May be changed at any time; `Limits` has its meaning.
        self.unread_timeout_s = limits.unread_timeout_s
        self._budgets = Budgets(limits)
        self.out = Outbound(limits, self._budgets)
        self.inbound = Inbound(self.out, limits, self.timers, self._budgets, memo)
        self._reader = FrameReader()
        shortcuts = Shortcuts(self.inbound, self.out, limits, self._budgets, memo)
        self._takers = shortcuts.by_kind()
        self._fresh = shortcuts.fresh
        self._is_draining = False
        self.is_failed = False
        # There are no new streams any more: `is_done` is true, or will be.
        self.is_ending = False
        self.out.control(frames.settings(self.inbound.own_settings()))
        more = limits.connection_window_bytes - DEFAULT_WINDOW_BYTES
        if more > 0:
            self.out.control(frames.window_update(0, more))

    @property
    def streams(self) -> dict[int, Stream]:
        """The streams that are not closed, by number."""
        return self.inbound.streams

    @property
    def is_done(self) -> bool:
        """Whether the connection can be closed: it has failed, or it was drained and has no stream any more."""
        return self.is_failed or (self.inbound.is_final and not self.inbound.streams)

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take what the peer has sent. The events are in order; after `ConnectionFailed` there are no more."""
        if self.is_failed:
            return []
        self.timers.heard_at = now
        try:
            self._read(data, now)
        except Http2ConnectionError as fault:
            self._fail(fault)
        self._fresh.clear()
        return self._take_events()

    def check(self, now: float) -> list[Event]:
        """Look at the clock: time-outs, keepalive, age. To be called about once a second."""
        if self.is_failed:
            return []
        try:
            self._check(now)
        except Http2ConnectionError as fault:
            self._fail(fault)
        return self._take_events()

    def _read(self, data: bytes, now: float) -> None:
        reader, take_by_kind = self._reader, self._takers
        if reader.rest:
            data, reader.rest = reader.rest + data, b""
        first = at = 0 if reader.has_preface else reader.begin(data)
        size = len(data)
        while size - at >= HEAD_BYTES and reader.has_preface:
            high, low, kind, flags, number = unpack_head(data, at)
            begin = at + HEAD_BYTES
            end = begin + (high << 8 | low)
            if end - begin > MAX_FRAME_BYTES:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a frame is larger than SETTINGS_MAX_FRAME_SIZE")
            if end > size:
                break
            at, number, payload = end, number & MAX_STREAM_ID, data[begin:end]
            take = take_by_kind.get(kind)
            if take is None or not take(flags, number, payload):
                self._on_frame(kind, flags, number, payload, now)
        if at < size:
            reader.rest = data[at:]
        if self.out.is_paused:
            self._check_flood()
        if at < size or self.inbound.block is not None:
            self.timers.has_part(now, is_another=at > first)
        else:
            self.timers.incomplete_since = None

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes, now: float) -> None:
        """Any frame, by all the rules."""
        self._fresh.clear()
        inbound = self.inbound
        inbound.check_order(kind, flags, number)
        try:
            check_shape(kind, number, payload)
            if kind == frames.PING:
                self._on_ping(flags, payload, now)
            else:
                inbound.on_frame(kind, flags, number, payload, now)
        except Http2StreamError as error:
            self._reset(error, now)
        if self.out.ended:
            self._settle()

    def _check_flood(self) -> None:
        if self.out.is_flooded:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "asks and does not read the answers")

    def _check(self, now: float) -> None:
        timers = self.timers
        timers.check(now)
        if timers.is_spent(now, is_used=bool(self.inbound.streams)):
            self._drain(now)
        if self._is_draining and not self.inbound.is_final and now - (timers.drain_began_at or now) >= _DRAIN_PING_S:
            self._finish_draining()
        if self.unread_timeout_s is not None:
            self._drop_unread(now, self.unread_timeout_s)
        if timers.needs_ping(now):
            self.out.control(frames.ping(_KEEPALIVE_PING, is_ack=False))
        self._check_flood()

    def _drop_unread(self, now: float, timeout_s: float) -> None:
        for stream in list(self.streams.values()):
            if not stream.backlog:
                stream.unread_since = None
            elif stream.unread_since is None:
                stream.unread_since = now
            elif now - stream.unread_since >= timeout_s:
                self.reset(stream, ErrorCode.CANCEL)
                self.inbound.events.append(StreamReset(stream, ErrorCode.CANCEL))

    def drain(self, now: float) -> None:
        """Take no new streams; the client is told in two steps, so that none of its requests is lost between them."""
        if not self.is_failed:
            self._drain(now)

    def _drain(self, now: float) -> None:
        if self._is_draining:
            return
        self._is_draining = True
        self.timers.drain_began_at = now
        self.out.control(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
        if self.timers.is_greeted:
            self.out.control(frames.ping(_DRAIN_PING, is_ack=False))
        else:
            self._finish_draining()

    def _finish_draining(self) -> None:
        self.inbound.is_final = self.is_ending = True
        self.out.control(frames.goaway(self.inbound.last_stream_id, ErrorCode.NO_ERROR))

    def close(self, message: str) -> list[Event]:
        """End the connection at once."""
        if not self.is_failed:
            self._fail(Http2ConnectionError(ErrorCode.NO_ERROR, message))
        return self._take_events()

    def send_headers(self, stream: Stream, block: bytes, *, is_end: bool = False) -> None:
        """Begin the response; with `is_end` it has neither body nor trailers."""
        if not stream.is_closed:
            self.out.send_headers(stream, block, is_end=is_end)
            if is_end:
                self._settle()

    def send_data(self, stream: Stream, data: bytes) -> None:
        """A piece of the body. What has to wait is the stream's `backlog` afterwards."""
        if not stream.is_closed:
            self.out.send_data(stream, data)
            self._settle()

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        """End the response, after its body."""
        if not stream.is_closed:
            self.out.send_trailers(stream, block)
            self._settle()

    def finish(self, stream: Stream, block: bytes) -> None:
        """End the response with trailers, after what waits of its body; it has begun."""
        out, size = self.out, len(block)
        if stream.backlog or not stream.has_peer_ended or out.is_paused or size > MAX_FRAME_BYTES or stream.is_closed:
            self.send_trailers(stream, block)
            return
        out.parts += (TRAILERS_HEADS[size], stream.id, block)
        stream.is_closed = stream.has_ended = True
        del self.inbound.streams[stream.number]

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End the stream without (the rest of) a response."""
        if not stream.is_closed:
            self.out.control(frames.rst_stream(stream.number, code))
            self.inbound.close(stream, ignore_late=not stream.has_peer_ended)

    def consume(self, stream: Stream, size: int) -> None:
        """The layer above has done with `size` bytes of a request: its client may send as many more."""
        self.inbound.consume(stream, size)

    def pause(self) -> None:
        """The transport is full."""
        self.out.is_paused = True

    def resume(self) -> list[Event]:
        """The transport takes more."""
        self.out.is_paused = False
        return self.pump()

    def pump(self) -> list[Event]:
        """Go on with what waited for the next loop turn or the transport."""
        self.out.pump()
        self._settle()
        return self._take_events()

    def _settle(self) -> None:
        """Close what has ended on our side."""
        out = self.out
        if not out.ended:
            return
        ended, out.ended = out.ended, []
        for stream in ended:
            if not stream.has_peer_ended:
                # The response did not need the rest of the request (RFC 9113, section 8.1).
                out.control(frames.rst_stream(stream.number, ErrorCode.NO_ERROR))
            self.inbound.close(stream, ignore_late=not stream.has_peer_ended)

    def _take_events(self) -> list[Event]:
        out, inbound = self.out, self.inbound
        if out.drained:
            inbound.events += (StreamDrained(stream) for stream in out.drained if not stream.has_ended)
            out.drained.clear()
        events, inbound.events = inbound.events, []
        return events

    def _on_ping(self, flags: int, payload: bytes, now: float) -> None:
        if flags & frames.ACK:
            if payload == _DRAIN_PING and self._is_draining and not self.inbound.is_final:
                self._finish_draining()
            else:
                self._budgets.chore(now)
            return
        self._budgets.ping(now)
        self.out.control(frames.ping(payload, is_ack=True))

    def _reset(self, fault: Http2StreamError, now: float) -> None:
        self._budgets.reset(now)
        self.out.control(frames.rst_stream(fault.stream_id, fault.code))
        stream = self.streams.get(fault.stream_id)
        if stream is not None:
            self.inbound.close(stream, ignore_late=not stream.has_peer_ended)
            self.inbound.events.append(StreamReset(stream, fault.code))

    def _fail(self, fault: Http2ConnectionError) -> None:
        self.is_failed = self.is_ending = True
        self.out.control(frames.goaway(self.inbound.last_stream_id, fault.code, fault.message))
        for stream in list(self.streams.values()):
            self.inbound.close(stream, ignore_late=False)
            self.inbound.events.append(StreamReset(stream, ErrorCode.CANCEL))
        self.inbound.events.append(ConnectionFailed(fault.code, fault.message))
