"""What has arrived for one request and was not read yet.

The stream fills it and holds it; a `Generation` reads it. They are two objects so that a generation which its caller
let go of can be told from one that will still be read.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from gateway.client.errors import GenerationError
from gateway.v1 import gateway_pb2


class Outputs:
    """A request's outputs in the order of arrival. The tokens of each go to `on_read` once: read, or given up."""

    def __init__(self, request: gateway_pb2.GenerateRequest, on_read: Callable[[int], None]) -> None:
        self.request_id = request.request_id
        self.is_ended = False
        self._is_left = False
        self._unfinished = request.sampling.n or 1
        self._unread: deque[gateway_pb2.GenerateResponse] = deque()
        self._error: GenerationError | None = None
        self._arrived = asyncio.Event()
        self._on_read = on_read

    @property
    def is_settled(self) -> bool:
        """Nothing waits to be read and nothing that comes will."""
        return not self._unread and (self.is_ended or self._is_left)

    async def next(self) -> gateway_pb2.GenerateResponse | None:
        """Wait for the next one; None after the last. Raises the error that ended the request."""
        while not self._unread:
            if self.is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._arrived.clear()
            await self._arrived.wait()
        output = self._unread.popleft()
        self._on_read(len(output.token_ids))
        return output

    def put(self, output: gateway_pb2.GenerateResponse) -> None:
        """Take the next one, whose tokens the stream has counted."""
        if output.HasField("finish"):
            self._unfinished -= 1
            self.is_ended = self._unfinished == 0
        if self._is_left:
            self._on_read(len(output.token_ids))
        else:
            self._unread.append(output)
        self._arrived.set()

    def fail(self, error: GenerationError) -> None:
        """Nothing more will come."""
        self.is_ended = True
        self._error = error
        self._arrived.set()

    def leave(self) -> None:
        """Nobody will read what is left, nor what still comes before the request has ended."""
        self._is_left = True
        while self._unread:
            self._on_read(len(self._unread.popleft().token_ids))
