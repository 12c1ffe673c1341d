"""Clients that keep a bounded number of requests going over several connections, with both RPCs."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

import grpc

from gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tests.chaos.book import OK, Book, Watched, outcome_of
from tests.chaos.connection import Connection, ManyStream
from tests.chaos.proxy import Path
from tests.chaos.site import NO_READ_AHEAD
from tests.chaos.traffic import Job, Traffic
from tests.support.processes import WAIT_S

DEFAULT_DEADLINE_S = 20.0
"""`limits.default_deadline_s` of the gateway."""
GRACE_S = 6.0
"""How long after its deadline a request may be without an end. Both processes share two busy cores."""
MAX_BEHIND_S = 1.0
"""Requests that were late are made up for, but no more than this."""
REQUESTS_PER_STREAM = 200
CALLS, STREAMED = 6, 8
"""Requests at a time on one connection: as calls of their own, and on its stream."""


Call: TypeAlias = "grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]"


class Pacer:
    """Lets requests go at a steady rate, whoever asks."""

    def __init__(self, rate: float) -> None:
        self._gap_s = 1 / rate
        self._next_at = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        self._next_at = max(self._next_at + self._gap_s, now - MAX_BEHIND_S)
        await asyncio.sleep(max(0.0, self._next_at - now))


class Clients:
    """The load of a run."""

    def __init__(
        self,
        book: Book,
        address: str,
        traffic: Callable[[str], Traffic],
        *,
        connections: int,
        rate: float,
    ) -> None:
        self.book = book
        self._traffic = traffic
        self._address = address
        self._pacer = Pacer(rate)
        self._is_stopping = False
        self._relays = [Path(address) for _ in range(connections // 3)]
        self._count = connections
        self.connections: list[Connection] = []

    async def open(self) -> None:
        """Connect; a third of the connections through relays that can be cut."""
        await asyncio.gather(*(relay.start() for relay in self._relays))
        self.connections = [Connection(relay.address, relay) for relay in self._relays]
        self.connections += [Connection(self._address) for _ in range(self._count - len(self._relays))]

    async def run(self) -> None:
        """Load until `stop`, and until every request has ended."""
        async with asyncio.TaskGroup() as group:
            for number, connection in enumerate(self.connections):
                for worker in range(CALLS):
                    group.create_task(self._call_forever(connection, f"g{number}.{worker}"))
                group.create_task(self._stream_forever(connection, f"m{number}"))

    def stop(self) -> None:
        """No new requests."""
        self._is_stopping = True

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self.connections))
        await asyncio.gather(*(relay.close() for relay in self._relays))

    async def burst(self, name: str, count: int) -> None:
        """So many short requests at once, over a connection of their own."""
        traffic = self._traffic(name)
        connection = Connection(self._address)
        try:
            await asyncio.gather(*(self.call(connection, traffic.next()) for _ in range(count)))
        finally:
            await connection.close()

    async def read_slowly(self, job: Job, rpc: str) -> None:
        """A request with much output on a connection of its own, whose reader pauses."""
        connection = Connection(self._address, None, *NO_READ_AHEAD)
        try:
            if rpc == "generate":
                await self.call(connection, job)
                return
            stream = ManyStream(connection, job.reads_slowly_s)
            await self._streamed(connection, stream, job)
            await stream.end(DEFAULT_DEADLINE_S + GRACE_S)
        finally:
            await connection.close()

    async def call(self, connection: Connection, job: Job) -> None:
        """One Generate call, to its end or until it is given up for hung."""
        watched = self.book.watch(job, "Generate")
        connection.begin(watched)
        limit_s = (job.deadline_s or DEFAULT_DEADLINE_S) + GRACE_S + job.reads_slowly_s
        stub = connection.stub
        call = stub.Generate(job.request, timeout=job.deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                await _read_call(stub, call, watched)
        except TimeoutError:
            watched.hung()
            watched.end("HUNG")
            call.cancel()
        finally:
            connection.running.discard(watched)

    async def _call_forever(self, connection: Connection, name: str) -> None:
        traffic = self._traffic(name)
        while not self._is_stopping:
            await self._pacer.turn()
            await self.call(connection, traffic.next())

    async def _stream_forever(self, connection: Connection, name: str) -> None:
        traffic = self._traffic(name)
        while not self._is_stopping:
            stream = ManyStream(connection)
            left = REQUESTS_PER_STREAM

            async def work(stream: ManyStream = stream) -> None:
                nonlocal left
                while left > 0 and not (self._is_stopping or stream.is_over):
                    left -= 1
                    await self._pacer.turn()
                    if not stream.is_over:
                        await self._streamed(connection, stream, traffic.next())

            await asyncio.gather(*(work() for _ in range(STREAMED)))
            await stream.end(DEFAULT_DEADLINE_S + GRACE_S)

    async def _streamed(self, connection: Connection, stream: ManyStream, job: Job) -> None:
        job.deadline_s = None  # of the whole stream, where calls have it
        watched = self.book.watch(job, "GenerateMany")
        connection.begin(watched)
        try:
            async with asyncio.timeout(DEFAULT_DEADLINE_S + GRACE_S + job.reads_slowly_s):
                await stream.run(watched)
        except TimeoutError:
            watched.hung()
            stream.forget(watched)
            watched.end("HUNG")
        finally:
            connection.running.discard(watched)


async def _read_call(stub: "gateway_pb2_grpc.GatewayServiceAsyncStub", call: Call, watched: Watched) -> None:
    job = watched.job
    try:
        if job.give_up_after == 0:
            await _give_up(stub, call, watched)
        while (response := await call.read()) is not grpc.aio.EOF:
            assert isinstance(response, gateway_pb2.GenerateResponse)
            watched.take(response)
            if watched.messages == job.give_up_after:
                await _give_up(stub, call, watched)
            if watched.messages == 1 and job.reads_slowly_s:
                await asyncio.sleep(job.reads_slowly_s)
    except grpc.aio.AioRpcError as error:
        watched.end(outcome_of(error), error.details() or "")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        # A time-out of ours cancels the call as well.
        if not call.cancelled() or (task is not None and task.cancelling()):
            raise
        watched.end("CANCELLED")
    else:
        watched.end(OK)


async def _give_up(stub: "gateway_pb2_grpc.GatewayServiceAsyncStub", call: Call, watched: Watched) -> None:
    watched.is_given_up = True
    if watched.job.aborts:
        await stub.Abort(gateway_pb2.AbortRequest(request_id=watched.id), timeout=WAIT_S)
    else:
        call.cancel()
