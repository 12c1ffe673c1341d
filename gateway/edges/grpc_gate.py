"""Bounds on calls, whatever they ask for: how many at once, how large their headers and messages, how long they stand.

The transport bounds what comes before a call: connections, handshakes, frames, streams per connection
(`gateway.edges.grpc_transport`). Everything here is answered with a typed error instead. Health is never refused.
"""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NoReturn, Protocol

import grpc

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_context import Metadata, RpcContext, Watchable
from gateway.edges.grpc_methods import Method
from gateway.edges.grpc_status import abort_with
from gateway.edges.grpc_watch import StreamWatch
from gateway.edges.metrics_families import Histogram
from gateway.edges.metrics_values import LIMIT_VALUES
from gateway.h2.server.faults import Faults

REJECTION_BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Seconds. A refusal costs a few hundred microseconds; more means that the event loop has much else to do."""

RETRY_S: Final = 1.0
# What a header counts for besides its name and value (RFC 7541, 4.1).
_HEADER_OVERHEAD_BYTES = 32
_BYTES_PER_CONTEXT_TOKEN = 16
_MIN_REQUEST_BYTES = 1024 * 1024


class TransportContext(RpcContext, Protocol):
    """The call as the transport gives it."""

    def peer(self) -> str:
        """The other end of the connection; two connections never have the same over TCP."""
        ...


class CallGate:
    """Counts the calls of `listen.grpc` and refuses those beyond the limits. `watch` looks after their streams."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        limits = config.limits
        self.hits: dict[str, int] = dict.fromkeys(LIMIT_VALUES, 0)
        self.rejection_durations = Histogram(REJECTION_BOUNDS)
        self.http2_faults = Faults(clock=clock)
        self.streams = 0
        self.watch = StreamWatch(limits, self.hits, clock)
        self.max_request_bytes = max_request_bytes(config)
        self._max_streams = limits.max_streams
        self._max_metadata_bytes = limits.max_metadata_bytes
        self.clock = clock
        self._calls_by_peer: dict[str, int] = {}

    def configure(self, config: Config) -> None:
        """Go by other bounds; those of messages and metadata stay, since the transport's own were set by them."""
        self._max_streams = config.limits.max_streams
        self.watch.configure(config.limits)

    @property
    def connections(self) -> int:
        """Connections with a live call."""
        return len(self._calls_by_peer)

    def check_metadata(self, metadata: Metadata | None) -> GatewayError | None:
        """Why headers of this size are refused; None lets them in."""
        limit = self._max_metadata_bytes
        size = 0
        for key, value in metadata or ():
            size += len(key) + len(value) + _HEADER_OVERHEAD_BYTES
        if size <= limit:
            return None
        self.hits["max_metadata_bytes"] += 1
        return GatewayError(
            Reason.METADATA_TOO_LARGE,
            f"the call's metadata has {size} bytes (32 of them per entry), at most {limit} are taken; send less",
            size_bytes=size,
            limit_bytes=limit,
        )

    def refused(self, since: float) -> None:
        """Note that something that came at `since` has just been answered with a refusal."""
        self.rejection_durations.observe(self.clock() - since)

    def open(self, method: Method) -> Callable[[Any, TransportContext], Any]:
        """The method with this gate before it."""
        call, is_bidi = method.call, method.kind == "bidi"

        async def run(data: Any, transport: TransportContext) -> Any:
            context = CallContext(transport, self)
            peer = transport.peer()
            error = self.enter(peer, 0 if is_bidi else len(data))
            if error is not None:
                await abort_with(context, error)
            try:
                return await call(self._checked(data) if is_bidi else data, context)
            finally:
                self.leave(peer, context.stream)

        return run

    def enter(self, peer: str, request_bytes: int) -> GatewayError | None:
        """Count a call of this connection until it leaves; or say why it is refused, and count nothing."""
        if self.streams >= self._max_streams:
            return self._too_many()
        if request_bytes > self.max_request_bytes:
            return self._too_large(request_bytes)
        self.streams += 1
        peers = self._calls_by_peer
        peers[peer] = peers.get(peer, 0) + 1
        return None

    def leave(self, peer: str, stream: Watchable | None = None) -> None:
        """The call has ended, and the watch over its stream, if there was one."""
        self.streams -= 1
        peers = self._calls_by_peer
        left = peers[peer] - 1
        if left:
            peers[peer] = left
        else:
            del peers[peer]
        if stream is not None:
            self.watch.discard(stream)

    async def _checked(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in messages:
            if len(message) > self.max_request_bytes:
                raise self._too_large(len(message))
            yield message

    def _too_many(self) -> GatewayError:
        self.hits["max_streams"] += 1
        return GatewayError(
            Reason.TOO_MANY_STREAMS,
            f"{self.streams} calls are open, the gateway takes no more at once; retry later or on another gateway",
            retryable=True,
            retry_after_s=RETRY_S,
            limit=self._max_streams,
        )

    def _too_large(self, size: int) -> GatewayError:
        self.hits["max_request_bytes"] += 1
        limit = self.max_request_bytes
        return GatewayError(
            Reason.MESSAGE_TOO_LARGE,
            f"the message has {size} bytes, at most {limit} are read; send a shorter prompt",
            size_bytes=size,
            limit_bytes=limit,
        )


class CallContext:
    """One call's context: the transport's, and what the gate wants to know of it.

    Methods are bound once per call, so that writing costs nothing more than the transport's own.
    """

    __slots__ = (
        "_gate",
        "_is_accepted",
        "_since",
        "_transport",
        "invocation_metadata",
        "outlet",
        "send_initial_metadata",
        "set_trailing_metadata",
        "stream",
        "time_remaining",
        "write",
    )

    def __init__(self, transport: RpcContext, gate: CallGate) -> None:
        self._transport = transport
        self._gate = gate
        self._since = gate.clock()
        self._is_accepted = False
        self.stream: Watchable | None = None
        self.write = transport.write
        self.outlet = getattr(transport, "outlet", None)
        self.send_initial_metadata = transport.send_initial_metadata
        self.set_trailing_metadata = transport.set_trailing_metadata
        self.invocation_metadata = transport.invocation_metadata
        self.time_remaining = transport.time_remaining

    def accepted(self, stream: Watchable | None = None) -> None:
        """The call's work has begun: an error from here on is no refusal. `stream` is watched until the call ends."""
        self._is_accepted = True
        if stream is not None:
            self.stream = stream
            self._gate.watch.add(stream)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """As the transport's; of a call that was not accepted its duration is noted."""
        try:
            await self._transport.abort(code, details, trailing_metadata)
        finally:
            if not self._is_accepted:
                self._gate.refused(self._since)


def max_request_bytes(config: Config) -> int:
    """The largest request message: as set, else enough for the longest prompt with its ids and its text."""
    limit = config.limits.max_request_bytes
    if limit is None:
        limit = max(_MIN_REQUEST_BYTES, _BYTES_PER_CONTEXT_TOKEN * config.model.max_context_tokens)
    return min(limit, config.listen.max_message_bytes)
