"""One request's outputs as they arrive."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.client.errors import GenerationError
from gateway.v1 import gateway_pb2

Abort = Callable[["Generation"], None]


class Generation:
    """An async iterator over a request's `GenerateResponse` messages; ends after the last sequence's `finish`.

    Raises `GenerationError` after the outputs that came before the error. Leaving `async with` early aborts the request.
    """

    def __init__(self, request: gateway_pb2.GenerateRequest, abort: Abort, on_read: Callable[[int], None]) -> None:
        self.request_id = request.request_id
        self.is_ended = False
        """Nothing more will arrive; there may be outputs that were not read yet."""
        self._unfinished = request.sampling.n or 1
        self._outputs: deque[gateway_pb2.GenerateResponse] = deque()
        self._error: GenerationError | None = None
        self._arrived = asyncio.Event()
        self._abort = abort
        self._on_read = on_read

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> gateway_pb2.GenerateResponse:
        while not self._outputs:
            if self.is_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        self._on_read(len(output.token_ids))
        return output

    async def tokens(self) -> list[int]:
        """All tokens that were not read yet, of all sequences in the order in which they came."""
        return [token for output in [output async for output in self] for token in output.token_ids]

    def abort(self) -> None:
        """Ask for the request's end; reading then raises `GenerationError` with reason ABORTED. Nothing once ended."""
        if not self.is_ended:
            self._abort(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
        self._discard()

    def put(self, output: gateway_pb2.GenerateResponse) -> None:
        """Called by the stream: the next output."""
        self._outputs.append(output)
        if output.HasField("finish"):
            self._unfinished -= 1
            self.is_ended = self._unfinished == 0
        self._arrived.set()

    def fail(self, error: GenerationError) -> None:
        """Called by the stream: nothing more will come."""
        self.is_ended = True
        self._error = error
        self._arrived.set()

    def _discard(self) -> None:
        """Nobody will read what is left."""
        while self._outputs:
            self._on_read(len(self._outputs.popleft().token_ids))
