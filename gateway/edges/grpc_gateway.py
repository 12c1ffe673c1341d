"""`gateway.v1.GatewayService`: generate tokens, end requests, show the ranks."""

import itertools
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.request import Sequence
from gateway.edges.grpc_context import Outlet, RpcContext
from gateway.edges.grpc_direct import generate_method
from gateway.edges.grpc_encode import encode_head, encode_output
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_many import ManyStream
from gateway.edges.grpc_methods import Service, bidi, decode, server_stream, unary
from gateway.edges.grpc_ranks import RankFeed
from gateway.edges.grpc_request import ANYONE, Call, RequestReader
from gateway.edges.grpc_writer import StreamWriter
from gateway.v1 import gateway_pb2

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

NAME = "gateway.v1.GatewayService"


class GenerateStream(StreamWriter):
    """Writes GenerateResponse messages: one per sequence and turn, with everything that is pending."""

    rpc = f"{NAME}/Generate"

    def __init__(self) -> None:
        super().__init__()
        self._heads: dict[int, bytes] = {}

    def encode(self, sequence: Sequence) -> Iterable[bytes]:
        """One message, none when the outbox turns out to be empty, several when it holds a great deal."""
        rest: list[bytes] = []
        message = encode_output(self._head(sequence), sequence, rest)
        return (message, *rest) if message else ()

    def send(self, sequence: Sequence, outlet: Outlet) -> None:
        """The same, pushed."""
        rest: list[bytes] = []
        message = encode_output(self._heads.get(sequence.index) or self._head(sequence), sequence, rest)
        if message:
            outlet.push(message)
            for more in rest:
                outlet.push(more)

    def _head(self, sequence: Sequence) -> bytes:
        head = self._heads.get(sequence.index)
        if head is None:
            head = self._heads[sequence.index] = encode_head(sequence.request.arrived.request_id, sequence.index)
        return head


class GatewayService:
    """The servicer. `service` is what a transport serves."""

    def __init__(self, config: Config, driver: "Driver", gate: CallGate) -> None:
        self._driver = driver
        self._gate = gate
        self._reader = RequestReader(config)
        self._max_live_per_stream = config.limits.max_streams_per_connection
        self._ranks = RankFeed(driver)
        self._many: set[ManyStream] = set()
        self._stream_numbers = itertools.count(1)
        self._closing: GatewayError | None = None
        self.service = Service(
            NAME,
            (
                generate_method(driver, self._reader, self._prepare),
                bidi("GenerateMany", gateway_pb2.GenerateManyRequest, self.generate_many),
                unary("Abort", gateway_pb2.AbortRequest, self.abort),
                unary("ListRanks", gateway_pb2.ListRanksRequest, self.list_ranks),
                server_stream("WatchRanks", gateway_pb2.WatchRanksRequest, self.watch_ranks),
            ),
            self._reader.configure,
        )

    def _prepare(self, data: bytes, call: Call, now: float) -> RequestArrived:
        return self._reader.generate(
            decode(gateway_pb2.GenerateRequest, data),
            call,
            now,
            client_key=ANYONE,
            arrived_at_unix_s=time.time(),
            sink=GenerateStream(),
        )

    async def generate_many(
        self, requests: AsyncIterator[gateway_pb2.GenerateManyRequest], context: RpcContext
    ) -> None:
        """Run many requests over one stream. Their ids are the stream's own."""
        client_key = f"many-{next(self._stream_numbers)}"
        stream = ManyStream(
            self._driver, self._reader, self._gate, client_key=client_key, max_live=self._max_live_per_stream
        )
        if self._closing is not None:
            raise self._closing
        self._many.add(stream)
        try:
            await stream.serve(requests, context)
        finally:
            self._many.discard(stream)

    async def abort(self, request: gateway_pb2.AbortRequest, _: RpcContext) -> gateway_pb2.AbortResponse:
        """End a live Generate request; an unknown id is no error."""
        live = self._driver.router.find(ANYONE, request.request_id)
        if live is not None:
            self._driver.cancel(live, Reason.ABORTED)
        return gateway_pb2.AbortResponse()

    async def list_ranks(self, _: gateway_pb2.ListRanksRequest, __: RpcContext) -> gateway_pb2.ListRanksResponse:
        """Every rank, now."""
        return gateway_pb2.ListRanksResponse(ranks=self._ranks.now())

    async def watch_ranks(self, _: gateway_pb2.WatchRanksRequest, context: RpcContext) -> None:
        """Every rank, after each change, until the client leaves or the gateway stops."""
        await self._ranks.watch(context)

    def close(self, error: GatewayError) -> None:
        """End the calls that would go on for ever with the error. Requests that are live go on."""
        self._closing = error
        self._ranks.close(error)
        for stream in self._many:
            stream.finish(error)
