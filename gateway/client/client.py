"""The client: starts requests on one multiplexed stream and hands out what comes back."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from gateway.client.errors import GenerationError
from gateway.client.generation import Generation
from gateway.client.stream import Stream
from gateway.v1 import gateway_pb2

Metadata = Sequence[tuple[str, str]]


class Client:
    """Talks to one gateway over one connection. Use it in one event loop, as an async context manager.

    `start` waits while `max_live` requests are live. Nothing is read from the connection while more than
    `max_buffered_tokens` have arrived that nobody has read: the gateway then holds the rest back, within its own bound.
    `metadata` (tenant, cache salt …) holds for every request. A stream that fails ends its requests; the next `start`
    opens another one.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        max_live: int = 1024,
        max_buffered_tokens: int = 1 << 20,
    ) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._metadata = tuple(metadata)
        self._max_buffered_tokens = max_buffered_tokens
        self._room = asyncio.Semaphore(max_live)
        self._stream: Stream | None = None
        self._is_closed = False
        self._next_number = 1

    async def start(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        request: gateway_pb2.GenerateRequest | None = None,
        **sampling: Any,
    ) -> Generation:
        """Send a request; `sampling` are fields of `gateway.v1.Sampling`. Refusals are raised when it is read.

        A whole `request` may be given in place of a prompt. Without an id it gets one; an id that is live here already
        raises `ValueError`. Of a client that is closed, also while this waits for room, `GenerationError` is raised here.
        """
        if request is None:
            request = gateway_pb2.GenerateRequest(
                prompt_token_ids=prompt_token_ids, sampling=gateway_pb2.Sampling(**sampling)
            )
        if not request.request_id:
            # A copy: the caller may send the same one again.
            given, request = request, gateway_pb2.GenerateRequest()
            request.CopyFrom(given)
            request.request_id = f"c{self._next_number}"
            self._next_number += 1
        await self._room.acquire()
        try:
            stream = self._open()
        except BaseException:
            self._room.release()
            raise
        return stream.start(request)

    async def close(self) -> None:
        """End every live request and close the connection."""
        self._is_closed = True
        try:
            if self._stream is not None:
                await self._stream.cancel()
        finally:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> Stream:
        if self._is_closed:
            raise GenerationError(grpc.StatusCode.CANCELLED, "the client was closed")
        if self._stream is None or self._stream.is_over:
            self._stream = Stream(self._channel, self._metadata, self._max_buffered_tokens, on_ended=self._room.release)
        return self._stream
