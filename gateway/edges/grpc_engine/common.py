"""What both standard engine services do with requests: generate and abort.

A client of these services (an SMG router, or anything generated from smg-grpc-proto) takes the gateway
for one engine with as many data-parallel ranks as the configuration has. The messages are each family's
own; what they mean is here, once. Semantics that clients rely on:
* a chunk carries new tokens only, and every token is in a chunk before the sequence's `complete`;
* each of the n sequences ends in exactly one `complete` with all its tokens;
* an Abort call ends the stream with `complete`s of reason "abort", and never fails for an unknown id;
* a field that is set but cannot be honoured is refused by name, never ignored.
"""

import time
from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

import grpc
import msgspec
from google.protobuf.message import Message

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.request import Request, Sequence
from gateway.edges.driver import Driver
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_engine.encode import Layout, SequenceEncoder
from gateway.edges.grpc_methods import Method
from gateway.edges.grpc_request import Call, RequestReader
from gateway.edges.grpc_stream import StreamWriter, serve_request
from gateway.types import Sampling

CLIENT_KEY = ""
"""Callers of the engine services share one identity: a router aborts from any of its connections."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A Generate request in neutral terms; ranges are not checked yet."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    n: int
    pinned_rank: int | None
    is_stream: bool


class Family(Protocol):
    """What differs between the engine services: their messages. `read` may raise `GatewayError`."""

    layout: Layout
    service_name: str

    def read(self, request: Message, reader: RequestReader) -> Wanted:
        """A Generate request in neutral terms; refuses what is set but unsupported."""
        ...

    def aborted_ids(self, request: Message) -> Iterable[str]:
        """The request ids of an Abort request."""
        ...


class EngineWriter(StreamWriter):
    """Sends one Generate call's sequences as chunks and completes, or as completes only."""

    def __init__(self, rpc: str, layout: Layout, request_id: str, wanted: Wanted) -> None:
        super().__init__()
        self.rpc = rpc
        self._is_stream = wanted.is_stream
        self._layout = layout
        self._request_id = request_id
        self._prompt_tokens = len(wanted.prompt_token_ids)
        # Made on first use: `n` is the client's word until the core has checked it.
        self._encoders: dict[int, SequenceEncoder] = {}

    def encode(self, sequence: Sequence) -> Iterable[bytes]:
        """New tokens as a chunk; at the finish also the sequence's complete."""
        token_ids, logprobs = sequence.take()
        encoder = self._encoder(sequence.index)
        messages: list[bytes] = []
        if token_ids:
            if self._is_stream:
                messages.append(encoder.chunk(token_ids, logprobs, sequence.cached_tokens))
            else:
                encoder.add(token_ids, logprobs)
        if sequence.finish:
            messages.append(encoder.complete(sequence.finish, sequence.cached_tokens))
        return messages

    def farewell(self, request: Request) -> Iterable[bytes] | None:
        """After an Abort call, a complete of reason "abort" with what it has for each unfinished sequence."""
        if request.error is None or request.error.reason is not Reason.ABORTED:
            return None
        return [
            self._encoder(sequence.index).complete("abort", sequence.cached_tokens)
            for sequence in request.sequences
            if not sequence.finish
        ]

    def _encoder(self, index: int) -> SequenceEncoder:
        encoder = self._encoders.get(index)
        if encoder is None:
            encoder = SequenceEncoder(self._layout, self._request_id, index, self._prompt_tokens)
            self._encoders[index] = encoder
        return encoder


class Engine:
    """The family-independent half of an engine service."""

    def __init__(self, config: Config, driver: Driver, family: Family) -> None:
        self._driver = driver
        self._family = family
        self._reader = RequestReader(config)
        self._rpc = f"{family.service_name}/Generate"

    async def generate(self, message: Message, context: RpcContext) -> None:
        """Answer Generate. Errors and cancellation leave as exceptions; nothing stays live behind them."""
        call = self._reader.call(context, self._driver.clock())
        wanted = self._family.read(message, self._reader)
        request_id = self._reader.request_id(wanted.request_id, call)
        writer = EngineWriter(self._rpc, self._family.layout, request_id, wanted)
        arrived = self._arrived(wanted, request_id, call, writer)
        await serve_request(self._driver, arrived, writer, call, context)

    async def abort(self, message: Message) -> int:
        """End the named requests; ids that are not live are fine. Returns how many were."""
        found = 0
        for request_id in self._family.aborted_ids(message):
            request = self._driver.router.find(CLIENT_KEY, request_id)
            if request is not None:
                found += 1
                self._driver.cancel(request, Reason.ABORTED)
        return found

    def _arrived(self, wanted: Wanted, request_id: str, call: Call, writer: EngineWriter) -> RequestArrived:
        return RequestArrived(
            client_key=CLIENT_KEY,
            request_id=request_id,
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=wanted.sampling,
            n=wanted.n,
            pinned_rank=self._reader.pin(wanted.pinned_rank, call),
            deadline_at=call.deadline_at,
            arrived_at_unix_s=time.time(),
            sink=writer,
        )


def refuse(message: Message, unsupported: Mapping[str, str], path: str = "") -> None:
    """Raise UNSUPPORTED_FIELD for the first set field that is in `unsupported` (field name -> what to do)."""
    for descriptor, value in message.ListFields():
        advice = unsupported.get(descriptor.name)
        if advice is None:
            continue
        if isinstance(value, Message) and not value.ByteSize() and descriptor.name == "custom_params":
            continue  # an empty bag of extras asks for nothing
        field = f"{path}{descriptor.name}"
        raise GatewayError(Reason.UNSUPPORTED_FIELD, f"{field}: {advice}", field=field)


def unimplemented(name: str, kind: str, advice: str) -> Method:
    """A method of the service that the gateway does not have (yet); the status says so in words."""

    async def call(_data: bytes, context: RpcContext) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not implemented by this gateway; {advice}")

    return Method(name, "server_stream" if kind == "server_stream" else "unary", call)
