"""From a request's outboxes to its response stream: what the driver flushes into, for calls with one request.

Two rules keep this cheap and bounded:
* tokens are taken when the transport is ready for the next message. So whatever arrives during a slow write leaves as
  one message, and a reader that stands still keeps its tokens in the outbox, where the core counts them against
  `limits.max_stream_buffer_bytes`, and for no longer than `limits.reader_stall_timeout_s`, after which `end_stalled` is
  called;
* no queue, no task and no protobuf object per token: one future per wait, bytes made by hand. On our own transport not
  even that: a flush pushes the message itself, and the request's end ends the call (`attach`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import structlog

from gateway.core.errors import GatewayError, Reason
from gateway.core.refusals import ended_by
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_context import DirectCall, MessageStream, Outlet, RpcContext
from gateway.edges.grpc_request import DEADLINE_SLACK_S
from gateway.edges.grpc_sink import StreamSink
from gateway.edges.grpc_status import defect_of, encode_status
from gateway.edges.grpc_trailing import trailing_block

if TYPE_CHECKING:
    from gateway.edges.driver import Driver
    from gateway.edges.grpc_gate import CallGate

_log = structlog.get_logger("gateway.grpc")


class Lane(Protocol):
    """A short cut from a sequence to the stream below its call: its `sink` instead of the writer while `stream` is set."""

    stream: MessageStream | None
    writer: "StreamWriter | None"


class StreamWriter(StreamSink, ABC):
    """Sends the output of one request on one response stream; a service's subclass knows the messages.

    `failure` is set when the client stood still for too long: then it is how the call ends, whatever the request did.
    """

    rpc = ""
    failure: GatewayError | None = None
    _cancel: Callable[[Reason], None] | None = None
    _call: DirectCall | None = None
    # What output may take while the call is ready and nothing waits. Subclasses that have such add them.
    _lanes: Seq[Lane] = ()
    _has_said_farewell = False
    # Set along with `_call`.
    _request: Request
    _driver: "Driver"
    _gate: "CallGate"
    _peer: str

    @abstractmethod
    def encode(self, sequence: Sequence) -> Iterable[bytes]:
        """Take the sequence's outbox and return the messages for it, none if there is nothing to say.

        `sequence.finish` is set when this is the sequence's last call.
        """

    def send(self, sequence: Sequence, outlet: Outlet) -> None:
        """Push the messages that `encode` makes. Subclasses do it without the detour where a token is all there is."""
        for message in self.encode(sequence):
            outlet.push(message)

    def farewell(self, request: Request) -> Iterable[bytes] | None:  # noqa: ARG002 - for subclasses
        """Messages that end the stream in order although the request has an error. None: the error is the status."""
        return None

    def flush(self, sequence: Sequence) -> None:
        """The sequence has tokens or a finish to send: at once, where the transport takes messages without a handler."""
        call = outlet = self._call
        if call is None or outlet is None:
            super().flush(sequence)
        elif outlet.is_ready and not self.pending:
            self.send(sequence, outlet)
            self._note_sent(call)
        else:
            self.pending.append(sequence)

    def push(self, message: bytes) -> None:
        """Send what a lane could not."""
        call = self._call
        if call is not None:
            call.push(message)
            self._note_sent(call)

    def _note_sent(self, call: DirectCall) -> None:
        """Something was pushed while nothing waited."""
        if not call.is_ready:
            self._shut_lanes()
            self.mark(is_under_way=True)  # until `_on_ready`

    def _shut_lanes(self) -> None:
        for lane in self._lanes:
            lane.stream = None

    def end(self, request: Request) -> None:
        """The request is over; what is pending still goes out, unless the reader was too slow for it."""
        call = self._call
        if call is None:
            super().end(request)
        elif request.error is None and not self.pending:
            try:
                self._finish(call, request)
            except Exception:  # noqa: BLE001 - nobody else would end the call
                self._break_off(call)
        else:
            super().end(request)
            self._send_pending(call)

    # With a handler, see `gateway.edges.grpc_stream`.

    async def run(self, context: RpcContext) -> None:
        """Write until the request has ended and everything of it is out."""
        pending = self.pending
        while True:
            while pending:
                item = pending.popleft()
                if isinstance(item, Request):
                    return
                for message in self.encode(item):
                    await self.write(context, message)
                    if self.failure is not None:
                        return
            await self.wait()

    async def write(self, context: RpcContext, message: bytes) -> None:
        """Send one message from the handler; returns when the transport takes the next one."""
        self.mark(is_under_way=True)
        await context.write(message)
        self.mark(is_under_way=False)

    def watch(self, context: RpcContext, cancel: Callable[[Reason], None]) -> None:
        """From here on the stream is ended when it stands still; `cancel` ends its request."""
        self._cancel = cancel
        context.accepted(self)

    # Without one, see `gateway.edges.grpc_direct`.

    def attach(self, call: DirectCall, request: Request, driver: "Driver", gate: "CallGate", peer: str) -> None:
        """From here on the output goes to the call by itself, and the call ends with the request or the other way round."""
        self._call = call
        self._request = request
        self._driver = driver
        self._gate = gate
        self._peer = peer
        call.on_ready = self._on_ready
        call.on_closed = self._on_closed
        gate.watch.add(self)

    def _on_ready(self) -> None:
        call = self._call
        if call is not None:
            self.mark(is_under_way=False)
            self._send_pending(call)

    def _send_pending(self, call: DirectCall) -> None:
        """Push what waits as far as the transport takes it, and end the call when the request's end is reached."""
        pending, request = self.pending, self._request
        try:
            while pending and call.is_ready:
                item = pending.popleft()
                if isinstance(item, Request):
                    self._finish(call, item)
                    return
                self.send(item, call)
        except Exception:  # noqa: BLE001 - as above, and a defect must not end the connection
            self._driver.cancel(request, Reason.INTERNAL)
            self._break_off(call)
        else:
            if not call.is_ready:
                self.mark(is_under_way=True)

    def _finish(self, call: DirectCall, request: Request) -> None:
        """The request's outcome is the call's."""
        error = request.error
        if error is not None and not self._say_farewell(call, request):
            self._fail(call, request, error)
        elif self._call is None:
            pass  # the farewell was too much for it
        elif not call.is_ready:
            # The client has yet to take the last message: until then it can be ended for standing still.
            self.pending.append(request)
            self._shut_lanes()
            self.mark(is_under_way=True)
            return
        else:
            block = trailing_block(request)
            self.close()
            call.finish(0, "", block)
        request.answered()

    def _say_farewell(self, call: DirectCall, request: Request) -> bool:
        """Whether the stream ends in order in spite of the error."""
        if not self._has_said_farewell:
            messages = self.farewell(request)
            if messages is None:
                return False
            self._has_said_farewell = True
            for message in messages:
                call.push(message)
        return True

    def _fail(self, call: DirectCall, request: Request, error: GatewayError) -> None:
        block = trailing_block(request)
        self.close()
        call.finish(*encode_status(error, block))

    def _break_off(self, call: DirectCall) -> None:
        """A defect ends the call. To be called while that is handled."""
        _log.exception("rpc_failed", rpc=self.rpc)
        self.close()
        call.finish(*encode_status(defect_of(self.rpc)))

    def _on_closed(self, is_late: bool) -> None:
        call = self._call
        if call is None:
            return
        remaining_s = call.time_remaining()
        if remaining_s is not None and remaining_s <= DEADLINE_SLACK_S:
            is_late = True
        request, has_ended = self._request, self._has_ended()
        self.close()
        if has_ended:
            request.answered()
        else:
            self._driver.cancel(request, Reason.DEADLINE_EXCEEDED if is_late else Reason.CANCELLED)

    def _has_ended(self) -> bool:
        """Whether the request's end waits here: then it comes no more."""
        return bool(self.pending) and isinstance(self.pending[-1], Request)

    # Either way.

    def end_stalled(self) -> None:
        """See `Watchable`. The request may have ended well by now: its output was not read all the same."""
        self.failure = ended_by(Reason.SLOW_READER)
        call = self._call
        if call is None:
            if self._cancel is not None:
                self._cancel(Reason.SLOW_READER)
            self.pending.clear()
            return
        request, has_ended = self._request, self._has_ended()
        self._driver.cancel(request, Reason.SLOW_READER)
        self._fail(call, request, self.failure)
        if has_ended:
            request.answered()

    def end_idle(self) -> None:
        """See `Watchable`; a stream with one request never is."""

    def close(self) -> None:
        """Let go of everything."""
        super().close()
        self._cancel = None
        if self._call is not None:
            self._call = None
            for lane in self._lanes:
                lane.stream = lane.writer = None
            self._lanes = ()
            del self._request
            self._gate.leave(self._peer, self)
