"""From a sequence's outbox to a gRPC stream: the sinks that the driver flushes into.

Output and ends are passed on in the order in which the driver brought them. Two rules keep this cheap and bounded:
* a flush only notes that a sequence has something; the tokens are taken when the transport is ready for the next
  message. So whatever arrives during a slow write leaves as one message, and a reader that stands still keeps its
  tokens in the outbox, where the core counts them against `limits.max_stream_buffer_bytes`, and for no longer than
  `limits.reader_stall_timeout_s`, after which `end_stalled` is called;
* no queue, no task and no protobuf object per token: one future per wait, bytes made by hand. Where the transport has
  an outlet, not even that: a flush pushes the message itself, and the handler only waits for the end.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.refusals import ended_by
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_context import Metadata, Outlet, RpcContext, outlet_of
from gateway.edges.grpc_request import REQUEST_ID_KEY, Call
from gateway.edges.grpc_status import abort_with
from gateway.edges.waiting import queue_ms

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

RANK_KEY = "x-rankgate-rank"
DECISION_ID_KEY = "x-rankgate-decision-id"
QUEUE_MS_KEY = "x-rankgate-queue-ms"
CACHE_KEY = "x-rankgate-cache"


class StreamSink:
    """A `Sink` (see the driver) that remembers what is to be sent until a handler asks for it.

    After `close` it ignores everything: the handler is gone, and it must not keep its requests alive.
    """

    def __init__(self) -> None:
        # In order; a request stands for its end. Each sequence at most once: the core marks it dirty, and its mark
        # stays until its outbox is taken.
        self.pending: deque[Sequence | Request] = deque()
        self.writes = 0
        self.idle_since: float | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def flush(self, sequence: Sequence) -> None:
        """The sequence has tokens or a finish to send."""
        if not self._is_closed:
            self.pending.append(sequence)
            self.wake()

    def end(self, request: Request) -> None:
        """The request is over; what is pending still goes out, unless the reader was too slow for it."""
        if self._is_closed:
            return
        if request.error is not None and request.error.reason is Reason.SLOW_READER:
            others = [item for item in self.pending if isinstance(item, Request) or item.request is not request]
            self.pending.clear()
            self.pending.extend(others)
        self.pending.append(request)
        self.wake()

    def wake(self) -> None:
        """Make a handler in `wait` look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next `wake`. For the one handler of this sink."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Let go of everything."""
        self._is_closed = True
        self.pending.clear()


class StreamWriter(StreamSink, ABC):
    """Sends the output of one request on one response stream; a service's subclass knows the messages.

    `failure` is set when the client stood still for too long: then it is how the call ends, whatever the request did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: GatewayError | None = None
        self._cancel: Callable[[Reason], None] | None = None
        self._outlet: Outlet | None = None

    @abstractmethod
    def encode(self, sequence: Sequence) -> Iterable[bytes]:
        """Take the sequence's outbox and return the messages for it, none if there is nothing to say.

        `sequence.finish` is set when this is the sequence's last call.
        """

    def farewell(self, request: Request) -> Iterable[bytes] | None:  # noqa: ARG002 - for subclasses
        """Messages that end the stream in order although the request has an error. None: the error is the status."""
        return None

    def flush(self, sequence: Sequence) -> None:
        """The sequence has tokens or a finish to send: at once, where the transport takes messages without a handler."""
        outlet = self._outlet
        if outlet is None:
            super().flush(sequence)
        elif outlet.is_ready and not self.pending:
            self._push(outlet, sequence)
        else:
            # The handler goes on with it when the outlet is ready.
            self.pending.append(sequence)

    async def run(self, context: RpcContext) -> None:
        """Write until the request has ended and everything of it is out."""
        self._outlet = outlet_of(context, self._on_ready)
        if self._outlet is None:
            await self._write(context)
            return
        while self.failure is None and not self._push_pending(self._outlet):
            await self.wait()

    def _push(self, outlet: Outlet, sequence: Sequence) -> None:
        for message in self.encode(sequence):
            outlet.push(message)
        if not outlet.is_ready:
            self._mark(is_under_way=True)  # until `_on_ready`

    def _push_pending(self, outlet: Outlet) -> bool:
        """Push what waits as far as the transport takes it. True when the request's end is reached."""
        pending = self.pending
        while pending and outlet.is_ready:
            item = pending.popleft()
            if isinstance(item, Request):
                return True
            self._push(outlet, item)
        return False

    def _on_ready(self) -> None:
        self._mark(is_under_way=False)
        self.wake()

    def _mark(self, *, is_under_way: bool) -> None:
        """A write begins or ends. Saying so twice makes no difference, or a stream would seem to stand still for good."""
        if self.writes % 2 != is_under_way:
            self.writes += 1

    async def write(self, context: RpcContext, message: bytes) -> None:
        """Send one message from the handler; returns when the transport takes the next one."""
        self._mark(is_under_way=True)
        await context.write(message)
        self._mark(is_under_way=False)

    async def _write(self, context: RpcContext) -> None:
        pending = self.pending
        while True:
            while pending:
                item = pending.popleft()
                if isinstance(item, Request):
                    return
                for message in self.encode(item):
                    await self.write(context, message)
                    if self.failure is not None:
                        return
            await self.wait()

    def watch(self, context: RpcContext, cancel: Callable[[Reason], None]) -> None:
        """From here on the stream is ended when it stands still; `cancel` ends its request."""
        self._cancel = cancel
        context.accepted(self)

    def end_stalled(self) -> None:
        """See `Watchable`. The request may have ended well by now: its output was not read all the same."""
        self.failure = ended_by(Reason.SLOW_READER)
        if self._cancel is not None:
            self._cancel(Reason.SLOW_READER)
        self.pending.clear()

    def close(self) -> None:
        """Let go of everything."""
        super().close()
        self._cancel = None
        self._outlet = None

    def end_idle(self) -> None:
        """See `Watchable`; a stream with one request never is."""


async def serve_request(
    driver: "Driver", arrived: RequestArrived, stream: StreamWriter, call: Call, context: RpcContext
) -> None:
    """Submit a request whose sink is `stream`, write its output and end the call with its outcome.

    However the handler is left, the request has ended afterwards and holds nothing. The request id goes out as
    trailing metadata, and as a header for callers that sent it as one: headers of their own cost a transport
    operation per request, which is a good part of a short one.
    """
    try:
        request = driver.submit(arrived)
    except GatewayError as error:
        await abort_with(context, error, _id_metadata(arrived))
    stream.watch(context, lambda reason: driver.cancel(request, reason))
    try:
        if call.request_id is not None:
            await context.send_initial_metadata(_id_metadata(arrived))
        await stream.run(context)
        farewell = stream.farewell(request) if stream.failure is None else None
        for message in farewell or ():
            await stream.write(context, message)
    finally:
        stream.close()
        # A no-op once the request has ended; else the client is gone or its transport failed.
        driver.cancel(request, call.early_end(driver.clock()))
    trailing = (*_id_metadata(arrived), *trailing_metadata(request))
    request.unlink()
    failure = stream.failure or request.error
    if failure is not None and farewell is None:
        await abort_with(context, failure, trailing)
    context.set_trailing_metadata(trailing)


def _id_metadata(arrived: RequestArrived) -> tuple[tuple[str, str], ...]:
    return ((REQUEST_ID_KEY, arrived.request_id),)


def trailing_metadata(request: Request) -> Metadata:
    """Where an accepted request went, which decision sent it there, how long it waited for that, or that it need not."""
    ranks = [str(sequence.attempt.rank) for sequence in request.sequences if sequence.attempt is not None]
    trailing: list[tuple[str, str]] = []
    if ranks:
        trailing.append((RANK_KEY, ",".join(ranks)))
    if request.decision_id is not None:
        trailing.append((DECISION_ID_KEY, str(request.decision_id)))
    if request.is_cached:
        trailing.append((CACHE_KEY, "hit"))
    trailing.append((QUEUE_MS_KEY, f"{queue_ms(request):.3f}"))
    return trailing
