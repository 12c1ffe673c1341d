"""One request as its caller sees it."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.client.outputs import Outputs
from gateway.v1 import gateway_pb2


class Generation:
    """An async iterator over a request's `GenerateResponse` messages; ends after the last sequence's `finish`.

    Raises `GenerationError` after the outputs that came before the error. Leaving `async with` early aborts the request.
    One that is let go of without it runs on, but what comes for it is thrown away.
    """

    def __init__(self, outputs: Outputs, abort: Callable[[Outputs], None]) -> None:
        self._outputs = outputs
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        """The id that was given, or the one that the client chose."""
        return self._outputs.request_id

    @property
    def is_ended(self) -> bool:
        """Nothing more will arrive; there may be outputs that were not read yet."""
        return self._outputs.is_ended

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> gateway_pb2.GenerateResponse:
        output = await self._outputs.next()
        if output is None:
            raise StopAsyncIteration
        return output

    async def tokens(self) -> list[int]:
        """All tokens that were not read yet, of all sequences in the order in which they came."""
        return [token for output in [output async for output in self] for token in output.token_ids]

    def abort(self) -> None:
        """Ask for the request's end; reading then raises `GenerationError` with reason ABORTED. Nothing once ended."""
        if not self.is_ended:
            self._abort(self._outputs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
        self._outputs.leave()

    def __del__(self) -> None:
        # The garbage collector calls from any thread and between any two steps of the loop's: the loop itself does it.
        if not (self._outputs.is_settled or self._loop.is_closed()):
            self._loop.call_soon_threadsafe(self._outputs.leave)
