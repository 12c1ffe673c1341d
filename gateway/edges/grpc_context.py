"""The part of a gRPC server's call context that servicers may use.

Every servicer takes an `RpcContext`, so that any gRPC transport can serve them: the methods here are those that
`grpc.aio.ServicerContext` documents, with its meaning, and no others.
"""

from collections.abc import Sequence
from typing import NoReturn, Protocol

import grpc

Metadata = Sequence[tuple[str, str | bytes]]


class RpcContext(Protocol):
    """One call. When the client cancels, disconnects or its deadline passes, the handler's task is cancelled."""

    async def write(self, message: bytes) -> None:
        """Send one serialised response message; returns when the transport takes the next one."""
        ...

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Send the response headers; at most once, before the first message."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Metadata to send with an OK status."""
        ...

    def invocation_metadata(self) -> Metadata | None:
        """The request headers: lower-case keys, bytes values for `-bin` keys."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline, or None when it has none."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with an error status. Raises `grpc.aio.AbortError`, which the handler lets pass."""
        ...
