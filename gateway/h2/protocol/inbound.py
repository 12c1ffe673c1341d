"""The receiving half of a connection: what each frame means, and which of RFC 9113's errors it may be."""

from gateway.h2.protocol import frames, settings
from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError, Http2StreamError
from gateway.h2.protocol.events import DataReceived, Event, RequestEnded, RequestStarted, StreamReset
from gateway.h2.protocol.header_blocks import Field, HeaderDecoder, HeaderListTooLargeError, OpenBlock
from gateway.h2.protocol.heads import HeadMemo, MalformedRequestError, RequestHead, check_trailers, read_head
from gateway.h2.protocol.limits import UPDATES_PER_FRAME, Budgets, Limits
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.reader import without_padding, without_priority
from gateway.h2.protocol.settings import MAX_WINDOW_BYTES
from gateway.h2.protocol.streams import Stream
from gateway.h2.protocol.timers import Timers


class Inbound:
    """Turns frames into events. Raises `Http2StreamError` and `Http2ConnectionError`, which `Connection` answers."""

    def __init__(self, out: Outbound, limits: Limits, timers: Timers, budgets: Budgets, memo: HeadMemo) -> None:
        self.streams: dict[int, Stream] = {}
        self.events: list[Event] = []
        self.last_stream_id = 0
        # GOAWAY has said which stream was the last.
        self.is_final = False
        self._out = out
        self._limits = limits
        self._timers = timers
        self.decoder = HeaderDecoder(limits.max_header_list_bytes, memo.fields)
        self._memo = memo
        self.block: OpenBlock | None = None
        self.credit = 0
        # Closed by us while the client could still be sending: its frames are late, not wrong. The oldest go first.
        self._late: dict[int, None] = {}
        self._budgets = budgets

    def own_settings(self) -> list[tuple[int, int]]:
        """What we ask of the peer."""
        return [
            (settings.HEADER_TABLE_SIZE, 0),
            (settings.MAX_CONCURRENT_STREAMS, self._limits.max_streams),
            (settings.INITIAL_WINDOW_SIZE, self._limits.stream_window_bytes),
            (settings.MAX_HEADER_LIST_SIZE, self._limits.max_header_list_bytes),
        ]

    def on_frame(self, kind: int, flags: int, number: int, payload: bytes, now: float) -> None:
        """One frame of any type but PING, in order and in shape."""
        if kind == frames.DATA:
            self._on_data(flags, number, payload, now)
        elif kind == frames.HEADERS:
            self._on_headers(flags, number, payload, now)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(number, payload)
        elif kind == frames.CONTINUATION:
            assert self.block is not None
            self._add_to_block(self.block, flags, payload, now)
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(number, payload, now)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, payload, now)
        elif kind == frames.PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            # PRIORITY, GOAWAY and what is unknown change nothing here.
            self._budgets.chore(now)

    def check_order(self, kind: int, flags: int, number: int) -> None:
        """SETTINGS come first, and nothing comes between the frames of a header block."""
        if not self._timers.is_greeted:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._timers.is_greeted = True
        if (kind == frames.CONTINUATION) != (self.block is not None) or (
            self.block is not None and number != self.block.number
        ):
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "a header block is interrupted, or there is none to go on"
            )

    def give_back(self, size: int) -> None:
        """So much of the connection's window is done with; the client is told in batches of half its size."""
        credit = self.credit + size
        if credit * 2 >= self._limits.connection_window_bytes:
            self._out.control(frames.window_update(0, credit))
            credit = 0
        self.credit = credit

    def consume(self, stream: Stream, size: int) -> None:
        """Give bytes of a body back to the stream's window."""
        if stream.is_closed or stream.has_peer_ended:
            return
        stream.receive_credit += size
        increment = stream.receive_credit
        if increment * 2 >= self._limits.stream_window_bytes:
            stream.receive_credit = 0
            stream.receive_left += increment
            self._out.control(frames.window_update(stream.number, increment))

    def close(self, stream: Stream, *, ignore_late: bool) -> None:
        """Forget a stream. With `ignore_late` what its client has sent meanwhile is no error."""
        stream.is_closed = True
        stream.has_ended = True
        self._out.drop(stream)
        self.streams.pop(stream.number, None)
        if ignore_late:
            self._ignore_late(stream.number)

    def _ignore_late(self, number: int) -> None:
        self._late[number] = None
        if len(self._late) > 2 * self._limits.max_streams:
            del self._late[next(iter(self._late))]

    def _on_data(self, flags: int, number: int, payload: bytes, now: float) -> None:
        size = len(payload)
        # The connection's window counts all of it, whatever becomes of the stream, and never runs out: what is bounded
        # is each stream, and the sum of incomplete messages by the layer above.
        self.give_back(size)
        data = without_padding(payload) if flags & frames.PADDED else payload
        is_end = bool(flags & frames.END_STREAM)
        if not data and not is_end:
            self._budgets.chore(now)
        stream = self._open_stream(number, is_end, now)
        if stream is None:
            return
        stream.receive_left -= size
        if stream.receive_left < 0:
            raise Http2StreamError(number, ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window allows")
        stream.received_bytes += len(data)
        if size > len(data):
            self.consume(stream, size - len(data))
        if data:
            self.events.append(DataReceived(stream, data))
        if is_end:
            self._end(stream)

    def _open_stream(self, number: int, is_end: bool, now: float) -> Stream | None:
        """The stream that a body or trailers are for; None for what comes too late to matter."""
        stream = self.streams.get(number)
        if stream is not None:
            if stream.has_peer_ended:
                raise Http2StreamError(number, ErrorCode.STREAM_CLOSED, "a frame after END_STREAM")
            return stream
        self._check_not_idle(number)
        if number not in self._late:
            raise Http2StreamError(number, ErrorCode.STREAM_CLOSED, "the stream is closed")
        self._budgets.chore(now)
        if is_end:
            del self._late[number]
        return None

    def _check_not_idle(self, number: int) -> None:
        if number > self.last_stream_id or not number % 2:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that was never opened")

    def _end(self, stream: Stream) -> None:
        stream.has_peer_ended = True
        if stream.expected_bytes is not None and stream.received_bytes != stream.expected_bytes:
            raise Http2StreamError(
                stream.number, ErrorCode.PROTOCOL_ERROR, "the body is not as long as content-length says"
            )
        self.events.append(RequestEnded(stream))

    def _on_headers(self, flags: int, number: int, payload: bytes, now: float) -> None:
        if not number % 2:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that is not the client's")
        if flags & frames.PADDED:
            payload = without_padding(payload)
        if flags & frames.HAS_PRIORITY:
            payload = without_priority(payload)
        limits = self._limits
        self.block = OpenBlock(
            number,
            is_end=bool(flags & frames.END_STREAM),
            max_bytes=2 * limits.max_header_list_bytes,
            max_frames=limits.max_header_frames,
        )
        self._add_to_block(self.block, flags, payload, now)

    def _add_to_block(self, block: OpenBlock, flags: int, payload: bytes, now: float) -> None:
        block.add(payload)
        if not flags & frames.END_HEADERS:
            return
        self.block = None
        if block.number > self.last_stream_id:
            self._on_request(block)
        else:
            self._on_trailers(block, self._decode(block.whole()), now)

    def _decode(self, block: bytes) -> list[Field] | None:
        """None for a list that is too large."""
        try:
            return self.decoder.decode(block)
        except HeaderListTooLargeError:
            return None

    def _on_trailers(self, block: OpenBlock, fields: list[Field] | None, now: float) -> None:
        number = block.number
        if number not in self.streams and number not in self._late:
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        stream = self._open_stream(number, block.is_end, now)
        if stream is None:
            return
        if not block.is_end or fields is None:
            raise Http2StreamError(number, ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM, or too many of them")
        try:
            check_trailers(fields)
        except MalformedRequestError as problem:
            raise Http2StreamError(number, ErrorCode.PROTOCOL_ERROR, str(problem)) from None
        self._end(stream)

    def _on_request(self, block: OpenBlock) -> None:
        number = self.last_stream_id = block.number
        self._budgets.updates += UPDATES_PER_FRAME
        head, timeout = self._read_head(block)
        if self.is_final or len(self.streams) >= self._limits.max_streams:
            raise self._refusal(block, ErrorCode.REFUSED_STREAM, "too many streams, or the connection closes")
        stream = Stream(number, self._out, self._out.peer.initial_window_bytes, self._limits.stream_window_bytes)
        self.streams[number] = stream
        self.events.append(RequestStarted(stream, head, timeout))
        if head is not None:
            stream.expected_bytes = head.content_length
        if block.is_end:
            self._end(stream)

    def _read_head(self, block: OpenBlock) -> tuple[RequestHead | None, bytes | None]:
        """The head and the time-out; no head for metadata that are too large."""
        whole, is_stateless = block.whole(), self.decoder.is_stateless
        known = self._memo.find(whole) if is_stateless else None
        if known is None:
            fields = self._decode(whole)
            if fields is None:
                return None, None
            try:
                known = read_head(fields)
            except MalformedRequestError as error:
                raise self._refusal(block, ErrorCode.PROTOCOL_ERROR, str(error)) from None
            if is_stateless:
                self._memo.remember(whole, known, fields, self._limits.max_header_list_bytes)
        return known

    def _refusal(self, block: OpenBlock, code: ErrorCode, message: str) -> Http2StreamError:
        if not block.is_end:
            self._ignore_late(block.number)
        return Http2StreamError(block.number, code, message)

    def _on_rst_stream(self, number: int, payload: bytes, now: float) -> None:
        self._check_not_idle(number)
        self._budgets.reset(now)
        self._late.pop(number, None)
        stream = self.streams.get(number)
        if stream is not None:
            self.close(stream, ignore_late=False)
            self.events.append(StreamReset(stream, int.from_bytes(payload)))

    def _on_settings(self, flags: int, payload: bytes, now: float) -> None:
        if flags & frames.ACK:
            if payload:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with a payload")
            if not self._timers.is_acknowledged:
                self._timers.is_acknowledged = True
                self.decoder.forbid_table()
            else:
                self._budgets.chore(now)
            return
        self._budgets.chore(now)
        peer = self._out.peer
        before = peer.initial_window_bytes
        peer.apply(payload)
        self._out.control(frames.SETTINGS_ACK)
        delta = peer.initial_window_bytes - before
        if delta:
            for stream in self.streams.values():
                if stream.send_window + delta > MAX_WINDOW_BYTES:
                    raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is above 2^31-1")
                self._out.grow(stream, delta)

    def _on_window_update(self, number: int, payload: bytes) -> None:
        self._budgets.window_update()
        increment = frames.read_u31(payload)
        if not number:
            if not increment:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._out.grow(None, increment)
            return
        self._check_not_idle(number)
        stream = self.streams.get(number)
        if stream is None:
            return  # crossed with the stream's end
        if not increment:
            raise Http2StreamError(number, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if stream.send_window + increment > MAX_WINDOW_BYTES:
            raise Http2StreamError(number, ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is above 2^31-1")
        self._out.grow(stream, increment)
