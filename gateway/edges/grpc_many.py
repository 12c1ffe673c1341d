"""GenerateMany: many requests over one bidirectional stream.

One task reads instructions, the handler itself writes; on our own transport nobody needs to be woken for that: what the
driver flushes in one loop turn is pushed as one message in the next one. Everything is bounded: live requests by
`limits.max_streams_per_connection`, unsent refusals by a constant at which reading pauses, and unsent tokens by the
core, per sequence, as for any other sink. A stream that stands still, or has nothing live for long, is ended.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from gateway.core.errors import GatewayError, Reason
from gateway.core.refusals import ended_by
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_context import Outlet, RpcContext, outlet_of
from gateway.edges.grpc_encode import FULL_MESSAGE_BYTES, encode_head, encode_many, encode_output
from gateway.edges.grpc_request import Call, RequestReader
from gateway.edges.grpc_sink import StreamSink
from gateway.edges.grpc_status import to_status
from gateway.v1 import gateway_pb2

if TYPE_CHECKING:
    from gateway.edges.driver import Driver
    from gateway.edges.grpc_gate import CallGate

MAX_UNSENT_REFUSALS = 256


class ManyStream(StreamSink):
    """The requests of one GenerateMany stream, and what is to be sent for them.

    Outputs and errors leave in the order in which the core let them out: within a message errors come after outputs,
    so an output that follows an error begins the next message. Only refusals of instructions, which are in no order,
    leave with whatever goes next.

    An id stays taken until its end has been handed to the transport, so what a client reads after an id's end
    belongs to the id's next request.
    """

    rpc = "gateway.v1.GatewayService/GenerateMany"

    def __init__(
        self, driver: "Driver", reader: RequestReader, gate: "CallGate", *, client_key: str, max_live: int
    ) -> None:
        super().__init__()
        self._gate = gate
        self._driver = driver
        self._reader = reader
        self._client_key = client_key
        self._max_live = max_live
        self._live: dict[str, Request] = {}
        self._heads: dict[Sequence, bytes] = {}
        self._refusals: list[bytes] = []
        self._refused_at: list[float] = []
        # What did not fit the message that its sequence's outbox was taken for.
        self._rest: list[bytes] = []
        self._has_room = asyncio.Event()
        self._is_reading = True
        self._failure: GatewayError | None = None
        self._outlet: Outlet | None = None
        self._is_push_due = False
        self._defect: Exception | None = None

    async def serve(self, requests: AsyncIterator[gateway_pb2.GenerateManyRequest], context: RpcContext) -> None:
        """Run the stream to its end. Whatever is still live when it ends early is cancelled."""
        call = self._reader.call(context, self._driver.clock())
        self.idle_since = self._gate.clock()
        context.accepted(self)
        # No task group: what the transport raises must reach the caller as it is.
        reading = asyncio.create_task(self._read(requests, call))
        reading.add_done_callback(lambda _: self._wake_handler())
        try:
            # At once, for clients that wait for the headers before they send anything.
            await context.send_initial_metadata(())
            self._outlet = outlet_of(context, self._on_ready)
            await self._write(context, reading)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.close()
            reason = call.early_end(self._driver.clock())
            while self._live:
                _, request = self._live.popitem()
                self._driver.cancel(request, reason)
        if self._failure is not None:
            raise self._failure

    def finish(self, error: GatewayError) -> None:
        """Read no more; end the stream with the error once its live requests have ended."""
        self._failure = error
        self._is_reading = False
        self.wake()

    def end_idle(self) -> None:
        """See `Watchable`."""
        self.finish(
            GatewayError(
                Reason.STREAM_IDLE,
                "the stream had no live request for limits.idle_stream_timeout_s; open another one when there is one",
                retryable=True,
            )
        )

    def end_stalled(self) -> None:
        """See `Watchable`. Nothing more is written of what was live; each request's end still is, and then the stream's."""
        for request in list(self._live.values()):
            self._driver.cancel(request, Reason.SLOW_READER)
        # Of requests that had ended well before, output is lost as well: the stream's status says so.
        self.pending = deque(item for item in self.pending if isinstance(item, Request))
        self._rest.clear()
        self.finish(ended_by(Reason.SLOW_READER))

    async def _read(self, requests: AsyncIterator[gateway_pb2.GenerateManyRequest], call: Call) -> None:
        try:
            async for instruction in requests:
                self._obey(instruction, call)
                while len(self._refusals) >= MAX_UNSENT_REFUSALS:
                    self._has_room.clear()
                    await self._has_room.wait()
        except GatewayError as error:
            # Garbage: what the client wants from here on is unknown, so nothing of it goes on.
            for request in list(self._live.values()):
                self._driver.cancel(request, Reason.ABORTED)
            self.finish(error)
        else:
            self._is_reading = False
            self.wake()

    def _obey(self, instruction: gateway_pb2.GenerateManyRequest, call: Call) -> None:
        came_at = self._gate.clock()
        if not self._live:
            self.idle_since = came_at
        kind = instruction.WhichOneof("message")
        if kind == "abort_request_id":
            request = self._live.get(instruction.abort_request_id)
            if request is not None:
                self._driver.cancel(request, Reason.ABORTED)
            return
        try:
            if kind is None or not self._is_reading:
                raise self._failure or GatewayError(Reason.INVALID_REQUEST, "set start or abort_request_id")
            self._start(instruction.start, call)
        except GatewayError as error:
            self._refusals.append(_encode_error(instruction.start.request_id, error))
            self._refused_at.append(came_at)
            self.wake()

    def _start(self, request: gateway_pb2.GenerateRequest, call: Call) -> None:
        request_id = request.request_id
        if not request_id:
            raise GatewayError(Reason.INVALID_REQUEST, "request_id: required on GenerateMany", field="request_id")
        if request_id in self._live:
            raise GatewayError(
                Reason.DUPLICATE_REQUEST_ID, f"{request_id!r} has not ended on this stream", request_id=request_id
            )
        if len(self._live) >= self._max_live:
            self._gate.hits["max_streams_per_connection"] += 1
            raise GatewayError(
                Reason.GATEWAY_FULL,
                f"{self._max_live} requests are live on this stream; wait for one to end or open another stream",
                retryable=True,
                limit=self._max_live,
            )
        arrived = self._reader.generate(
            request,
            call,
            self._driver.clock(),
            client_key=self._client_key,
            arrived_at_unix_s=time.time(),
            sink=self,
        )
        self._live[request_id] = self._driver.submit(arrived)
        self.idle_since = None

    async def _write(self, context: RpcContext, reading: "asyncio.Task[None]") -> None:
        while True:
            if self._outlet is None:
                while self.pending or self._refusals or self._rest:
                    message = self._next_message()
                    if message:
                        self.mark(is_under_way=True)
                        await context.write(message)
                        self.mark(is_under_way=False)
            if reading.done():
                reading.result()
            if self._defect is not None:
                raise self._defect
            if self._is_over():
                return
            await self.wait()

    def _is_over(self) -> bool:
        """Whether everything has been asked for, and taken."""
        if self._is_reading or self._live or self.pending or self._refusals or self._rest:
            return False
        return self._outlet is None or self._outlet.is_ready

    def wake(self) -> None:
        """There is something to send, or the stream may be over."""
        if self._outlet is None:
            self._wake_handler()
        elif not self._is_push_due:
            self._is_push_due = True
            asyncio.get_running_loop().call_soon(self._push)

    def _wake_handler(self) -> None:
        super().wake()

    def close(self) -> None:
        """Let go of everything."""
        super().close()
        self._outlet = None

    def _on_ready(self) -> None:
        self.mark(is_under_way=False)
        self.wake()

    def _push(self) -> None:
        """One message with all that waits. What it can't hold follows in the next turn, when the transport has seen it."""
        self._is_push_due = False
        outlet = self._outlet
        if outlet is None:
            return
        try:
            if outlet.is_ready and (self.pending or self._refusals or self._rest):
                message = self._next_message()
                if message:
                    outlet.push(message)
        except Exception as error:  # noqa: BLE001 - raised where the call is answered
            self._defect = error
            self._wake_handler()
            return
        if not outlet.is_ready:
            self.mark(is_under_way=True)
        elif self.pending or self._refusals or self._rest:
            self.wake()
        elif not self._is_reading and not self._live:
            self._wake_handler()

    def _next_message(self) -> bytes:
        pending, heads = self.pending, self._heads
        outputs: list[bytes] = []
        errors, self._refusals = self._refusals, []
        for came_at in self._refused_at:
            self._gate.refused(came_at)
        self._refused_at.clear()
        self._has_room.set()
        if self._rest:
            # Alone: a message has one entry per sequence, and there may be more of this one.
            return encode_many((self._rest.pop(0),), errors)
        size = sum(map(len, errors))
        has_failed = False
        while pending and size < FULL_MESSAGE_BYTES:
            item = pending.popleft()
            if isinstance(item, Request):
                error = self._settle(item)
                if error is not None:
                    has_failed = True
                    errors.append(error)
                    size += len(error)
                continue
            if has_failed:
                pending.appendleft(item)
                break
            output = encode_output(heads.get(item) or self._new_head(item), item, self._rest)
            if output:
                outputs.append(output)
                size += len(output)
            if self._rest:
                break
        return encode_many(outputs, errors)

    def _settle(self, request: Request) -> bytes | None:
        """Forget a request whose output is out or in this message: its id is free again. Returns its error, if any."""
        request_id = request.arrived.request_id
        self._live.pop(request_id, None)
        if not self._live:
            self.idle_since = self._gate.clock()
        for sequence in request.sequences:
            self._heads.pop(sequence, None)
        request.answered()
        return _encode_error(request_id, request.error) if request.error is not None else None

    def _new_head(self, sequence: Sequence) -> bytes:
        head = self._heads[sequence] = encode_head(sequence.request.arrived.request_id, sequence.index)
        return head


def _encode_error(request_id: str, error: GatewayError) -> bytes:
    return gateway_pb2.RequestError(request_id=request_id, status=to_status(error)).SerializeToString()
