"""One GenerateMany stream and the requests that live on it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from gateway.client.errors import GenerationError, from_call, from_status
from gateway.client.generation import Generation
from gateway.client.outputs import Outputs
from gateway.v1 import gateway_pb2

METHOD = "/gateway.v1.GatewayService/GenerateMany"


class Stream:
    """Sends instructions one after the other and gives each response to its request. `on_ended`: one has ended."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: tuple[tuple[str, str], ...],
        max_buffered_tokens: int,
        *,
        on_ended: Callable[[], None],
    ) -> None:
        method: Any = channel.stream_stream(
            METHOD,
            request_serializer=gateway_pb2.GenerateManyRequest.SerializeToString,
            response_deserializer=gateway_pb2.GenerateManyResponse.FromString,
        )
        self._call = method(metadata=metadata)
        self._live: dict[str, Outputs] = {}
        self._on_ended = on_ended
        self._max_buffered_tokens = max_buffered_tokens
        self._buffered_tokens = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        # Cancelling a write cancels the whole call, so callers never wait for one: a task of the stream's own writes.
        # At most one start and a few aborts per live request wait here.
        self._instructions: deque[gateway_pb2.GenerateManyRequest] = deque()
        self._has_instructions = asyncio.Event()
        # Standing still for want of room must not outlast the call, or nobody here would learn that it has ended.
        self._call.add_done_callback(lambda _: self._has_room.set())
        self.is_over = False
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    def start(self, request: gateway_pb2.GenerateRequest) -> Generation:
        """Send the request. `on_ended` is called for it once, also when it raises `ValueError`: its id is live here."""
        if request.request_id in self._live:
            self._on_ended()
            raise ValueError(f"request id {request.request_id!r} is live on this stream")
        outputs = self._live[request.request_id] = Outputs(request, self._on_read)
        if self.is_over:
            self._end(outputs, GenerationError(grpc.StatusCode.UNAVAILABLE, "the stream ended"))
        else:
            self._send(gateway_pb2.GenerateManyRequest(start=request))
        return Generation(outputs, self._abort)

    async def cancel(self) -> None:
        """End the call and every request on it."""
        self._call.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    def _abort(self, outputs: Outputs) -> None:
        self._send(gateway_pb2.GenerateManyRequest(abort_request_id=outputs.request_id))

    def _send(self, instruction: gateway_pb2.GenerateManyRequest) -> None:
        self._instructions.append(instruction)
        self._has_instructions.set()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader says why it ended
            while True:
                while self._instructions:
                    await self._call.write(self._instructions.popleft())
                self._has_instructions.clear()
                await self._has_instructions.wait()

    async def _read(self) -> None:
        error = GenerationError(grpc.StatusCode.UNAVAILABLE, "the gateway ended the stream")
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._deliver(message)
                await self._has_room.wait()
        except grpc.aio.AioRpcError as failure:
            error = from_call(failure)
        except asyncio.CancelledError:
            error = GenerationError(grpc.StatusCode.CANCELLED, "the client was closed")
        finally:
            self.is_over = True
            self._call.cancel()  # for an error of this side: nothing would read what the gateway goes on sending
            self._writer.cancel()
            for outputs in list(self._live.values()):
                self._end(outputs, error)

    def _deliver(self, message: gateway_pb2.GenerateManyResponse) -> None:
        for output in message.outputs:
            outputs = self._live.get(output.request_id)
            if outputs is None:
                continue
            self._buffered_tokens += len(output.token_ids)
            outputs.put(output)
            if outputs.is_ended:
                self._end(outputs)
        for failed in message.errors:
            outputs = self._live.get(failed.request_id)
            if outputs is not None:
                self._end(outputs, from_status(failed.status))
        if self._buffered_tokens > self._max_buffered_tokens and not self._call.done():
            self._has_room.clear()

    def _end(self, outputs: Outputs, error: GenerationError | None = None) -> None:
        del self._live[outputs.request_id]
        if error is not None:
            outputs.fail(error)
        self._on_ended()

    def _on_read(self, tokens: int) -> None:
        self._buffered_tokens -= tokens
        if self._buffered_tokens <= self._max_buffered_tokens:
            self._has_room.set()
