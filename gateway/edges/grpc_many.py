"""GenerateMany: many requests over one bidirectional stream.

One task reads instructions, the handler itself writes. Everything is bounded: live requests by
`limits.max_streams_per_connection`, unsent errors by a constant at which reading pauses, and unsent tokens by the
core, per sequence, as for any other sink.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from gateway.core.errors import GatewayError, Reason
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_encode import encode_head, encode_many, encode_output
from gateway.edges.grpc_request import Call, RequestReader
from gateway.edges.grpc_status import to_status
from gateway.edges.grpc_stream import StreamSink
from gateway.v1 import gateway_pb2

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

# A message is closed at this size. With one more sequence's backlog (1 MiB by default) it stays below the 4 MiB that
# clients accept unless told otherwise.
FULL_MESSAGE_BYTES = 1024 * 1024
MAX_UNSENT_ERRORS = 256


class ManyStream(StreamSink):
    """The requests of one GenerateMany stream, and what is to be sent for them.

    An id stays taken until its end has been handed to the transport, so what a client reads after an id's end
    belongs to the id's next request.
    """

    rpc = "gateway.v1.GatewayService/GenerateMany"

    def __init__(self, driver: "Driver", reader: RequestReader, *, client_key: str, max_live: int) -> None:
        super().__init__()
        self._driver = driver
        self._reader = reader
        self._client_key = client_key
        self._max_live = max_live
        self._live: dict[str, Request] = {}
        self._heads: dict[Sequence, bytes] = {}
        self._errors: list[bytes] = []
        self._has_room = asyncio.Event()
        self._is_reading = True
        self._failure: GatewayError | None = None

    async def serve(self, requests: AsyncIterator[gateway_pb2.GenerateManyRequest], context: RpcContext) -> None:
        """Run the stream to its end. Whatever is still live when it ends early is cancelled."""
        call = self._reader.call(context, self._driver.clock())
        # No task group: what the transport raises must reach the caller as it is.
        reading = asyncio.create_task(self._read(requests, call))
        reading.add_done_callback(lambda _: self.wake())
        try:
            # At once, for clients that wait for the headers before they send anything.
            await context.send_initial_metadata(())
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

    async def _read(self, requests: AsyncIterator[gateway_pb2.GenerateManyRequest], call: Call) -> None:
        try:
            async for instruction in requests:
                self._obey(instruction, call)
                while len(self._errors) >= MAX_UNSENT_ERRORS:
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
            self._report(instruction.start.request_id, error)
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

    async def _write(self, context: RpcContext, reading: "asyncio.Task[None]") -> None:
        while True:
            while self.pending or self._errors or self.ended:
                message = self._next_message()
                if message:
                    await context.write(message)
            if reading.done():
                reading.result()
            if not self._is_reading and not self._live:
                return
            await self.wait()

    def _next_message(self) -> bytes:
        pending, heads = self.pending, self._heads
        outputs: list[bytes] = []
        size = 0
        while pending and size < FULL_MESSAGE_BYTES:
            sequence = pending.popleft()
            output = encode_output(heads.get(sequence) or self._new_head(sequence), sequence)
            if output:
                outputs.append(output)
                size += len(output)
        if pending:
            return encode_many(outputs, ())
        # Every ended request's output is out or in this message: its error may follow, and its id is free again.
        self._settle()
        errors, self._errors = self._errors, []
        self._has_room.set()
        return encode_many(outputs, errors)

    def _settle(self) -> None:
        for request in self.ended:
            request_id = request.arrived.request_id
            self._live.pop(request_id, None)
            for sequence in request.sequences:
                self._heads.pop(sequence, None)
            request.unlink()
            if request.error is not None:
                self._report(request_id, request.error)
        self.ended.clear()

    def _report(self, request_id: str, error: GatewayError) -> None:
        entry = gateway_pb2.RequestError(request_id=request_id, status=to_status(error))
        self._errors.append(entry.SerializeToString())

    def _new_head(self, sequence: Sequence) -> bytes:
        head = self._heads[sequence] = encode_head(sequence.request.arrived.request_id, sequence.index)
        return head
