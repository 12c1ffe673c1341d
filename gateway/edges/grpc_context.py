"""The part of a gRPC server's call context that servicers may use.

Every servicer takes an `RpcContext`, so that any gRPC transport can serve them: but for `accepted`, which is the
gate's (`gateway.edges.grpc_gate`), the methods here are those that `grpc.aio.ServicerContext` documents, with its
meaning, and no others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import grpc

Metadata = Sequence[tuple[str, str | bytes]]


class Watchable(Protocol):
    """A response stream that can stand still.

    `writes` counts the beginnings and ends of writes, so it is odd while one is under way. `idle_since` is when the last
    thing that the stream was open for ended, in seconds of the gate's clock; None for what is never idle.
    """

    writes: int
    idle_since: float | None

    def end_stalled(self) -> None:
        """The client has not taken a write for too long: end what is live, and let go of what is unsent."""
        ...

    def end_idle(self) -> None:
        """Nothing has happened for too long: end the stream."""
        ...


class Outlet(Protocol):
    """A response stream that takes messages at once, also from outside of the call's handler.

    While `is_ready`, a message goes out at once; one that is pushed when it is not waits in the transport.
    """

    is_ready: bool

    def push(self, message: bytes) -> None:
        """Send one serialised response message."""
        ...


def outlet_of(context: "RpcContext", on_ready: Callable[[], None]) -> Outlet | None:
    """The call's outlet, None where the transport has none. `on_ready` is called when it is ready again."""
    open_outlet: Callable[[Callable[[], None]], Outlet] | None = getattr(context, "outlet", None)
    return None if open_outlet is None else open_outlet(on_ready)


class CallHead(Protocol):
    """The headers of one call, shared by calls with the same ones; `memo` is what this layer has made of them."""

    memo: Any
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class MessageStream(Protocol):
    """The inmost part of a call."""

    def push(self, message: bytes) -> bool:
        """Send a message that can go out as it is, at once. False: it was not sent, and is for the call's `push`."""
        ...


class DirectCall(Outlet, Protocol):
    """A call that is served without a task: by `push`, and `finish` at its end.

    `on_ready` is called when `is_ready` is true again, `on_closed` when the call ends without `finish`: with True when
    its deadline has passed, with False when the client is gone.
    """

    head: CallHead
    deadline_at: float | None
    on_ready: Callable[[], None] | None
    on_closed: Callable[[bool], None] | None

    @property
    def stream(self) -> MessageStream:
        """What takes messages without a detour, once the first one was pushed."""
        ...

    def peer(self) -> str:
        """The other end of the connection."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline, or None when it has none."""
        ...

    def send_head(self, initial_metadata: Metadata) -> None:
        """Send the response headers; at most once, before the first message."""
        ...

    def finish(self, code: int, details: str = "", trailing_block: bytes = b"") -> None:
        """End the call with a status and encoded metadata."""
        ...


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

    def accepted(self, stream: Watchable | None = None) -> None:
        """The call's work has begun: an error from here on is no refusal. `stream` is ended when it stands still."""
        ...
