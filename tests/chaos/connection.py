"""One client's connection, and a stream on it that carries many requests."""

import asyncio
import math
import time
from collections.abc import AsyncIterator

import grpc

from gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tests.chaos.book import OK, Watched, outcome_of, reason_of
from tests.chaos.proxy import Path
from tests.chaos.site import connect

NOTICE_S = 0.5
"""A client may send for so long into a connection that was reset at its far end."""


class Connection:
    """One client's connection, which faults close. With `relay` it goes through a network that can be cut."""

    def __init__(self, address: str, relay: Path | None = None, *options: tuple[str, int]) -> None:
        self._address = address
        self._relay = relay
        self.channel = connect(address, *options)
        self.running: set[Watched] = set()
        self.tears = 0
        """How often a fault closed it."""
        self._reset_at = -math.inf

    @property
    def stub(self) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        return gateway_pb2_grpc.GatewayServiceStub(self.channel)

    def begin(self, watched: Watched) -> None:
        """A request starts on it."""
        watched.is_torn = time.monotonic() - self._reset_at < NOTICE_S
        self.running.add(watched)

    async def tear(self, *, abrupt: bool) -> int:
        """Close it with all that runs on it, in order or (through a relay) by a reset. How many requests that were."""
        self.tears += 1
        for watched in self.running:
            watched.is_torn = True
        torn = len(self.running)
        if abrupt and self._relay is not None:
            self._reset_at = time.monotonic()
            self._relay.cut()
        else:
            old, self.channel = self.channel, connect(self._address)
            await old.close()
        return torn

    async def close(self) -> None:
        await self.channel.close()


class ManyStream:
    """A GenerateMany stream with several requests on it."""

    def __init__(self, connection: Connection, pause_s: float = 0.0) -> None:
        self._connection = connection
        self._pause_s = pause_s
        self._instructions: asyncio.Queue[gateway_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._waiting: dict[str, tuple[Watched, asyncio.Event]] = {}
        self.is_over = False
        self._tears = connection.tears
        self._call = connection.stub.GenerateMany(self._outgoing())
        self._reading = asyncio.create_task(self._read())

    async def run(self, watched: Watched) -> None:
        """Start a request and wait for its end."""
        ended = asyncio.Event()
        self._waiting[watched.id] = watched, ended
        if self.is_over:
            self._end_all("CONNECTION_LOST", "the stream had ended")
            return
        self._put(start=watched.job.request)
        if watched.job.give_up_after == 0:
            self._give_up(watched)
        await ended.wait()

    async def end(self, timeout_s: float) -> None:
        """Half-close, and wait for the stream's end."""
        self._instructions.put_nowait(None)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._reading)
        except TimeoutError:
            self._call.cancel()
            await self._reading

    def forget(self, watched: Watched) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(watched.id, None)

    def _put(self, **instruction: object) -> None:
        self._instructions.put_nowait(gateway_pb2.GenerateManyRequest(**instruction))  # type: ignore[arg-type]

    def _give_up(self, watched: Watched) -> None:
        watched.is_given_up = True
        self._put(abort_request_id=watched.id)

    async def _outgoing(self) -> AsyncIterator[gateway_pb2.GenerateManyRequest]:
        while (instruction := await self._instructions.get()) is not None:
            yield instruction

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                assert isinstance(response, gateway_pb2.GenerateManyResponse)
                self._take(response)
                if self._pause_s:
                    pause, self._pause_s = self._pause_s, 0.0
                    await asyncio.sleep(pause)
            self._end_all("STREAM_ENDED", "the stream ended with OK")
        except grpc.aio.AioRpcError as error:
            self._end_all(outcome_of(error), error.details() or "")
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
            self._end_all("CANCELLED", "")

    def _take(self, response: gateway_pb2.GenerateManyResponse) -> None:
        for output in response.outputs:
            entry = self._waiting.get(output.request_id)
            if entry is None:
                continue  # hung and forgotten
            watched, _ = entry
            watched.take(output)
            if watched.messages == watched.job.give_up_after and not watched.is_given_up:
                self._give_up(watched)
            if watched.is_complete:
                self._end(watched.id, OK, "")
        for error in response.errors:
            if error.request_id in self._waiting:
                self._end(error.request_id, reason_of(error.status), error.status.message)

    def _end(self, request_id: str, outcome: str, detail: str) -> None:
        watched, ended = self._waiting.pop(request_id)
        watched.end(outcome, detail)
        ended.set()

    def _end_all(self, outcome: str, detail: str) -> None:
        self.is_over = True
        is_torn = self._tears != self._connection.tears
        for request_id in list(self._waiting):
            self._waiting[request_id][0].is_torn |= is_torn
            self._end(request_id, outcome, detail)
