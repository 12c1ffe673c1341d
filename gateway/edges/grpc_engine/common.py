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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NoReturn

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
from gateway.edges.grpc_engine.fleet import FleetView, RankLoad
from gateway.edges.grpc_methods import Method, Service, server_stream, unary
from gateway.edges.grpc_request import ANYONE, Call, RequestReader
from gateway.edges.grpc_stream import StreamWriter, serve_request
from gateway.types import Sampling

NO_MEDIA = "multimodal input is not supported; send a text-only prompt"
NO_GRAMMAR = "structured output is not supported; leave it unset"
NO_PD = "disaggregated prefill and decode are not supported; leave it unset"
NO_STOP_STRINGS = "ranks match token ids only; use stop_token_ids, or match strings where the text is made"
"""What to do about fields that neither family's ranks can honour; see `refuse`."""

_STREAMS: Final = ("GetTokenizer", "SubscribeKvEvents")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A Generate request in neutral terms; ranges are not checked yet."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    n: int
    pinned_rank: int | None
    is_stream: bool


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


class EngineService(ABC):
    """One family's service. What a request means and how the ranks are summed up is here; messages are the family's.

    `messages` is the generated module, whose names both families share; `unimplemented` maps methods that the gateway
    does not have (yet) to what to do instead.
    """

    layout: ClassVar[Layout]
    service_name: ClassVar[str]
    messages: ClassVar[Any]
    unimplemented: ClassVar[dict[str, str]] = {
        "FlushCache": "restart the ranks instead",
        "StartProfile": "profile the engine directly",
        "StopProfile": "profile the engine directly",
        "GetTokenizer": "load it from the path that GetModelInfo names",
        "SubscribeKvEvents": "poll GetLoads instead",
    }

    def __init__(self, config: Config, driver: Driver) -> None:
        self.model = config.model
        self.fleet = FleetView(config, driver)
        self._driver = driver
        self._reader = RequestReader(config)
        self._rpc = f"{self.service_name}/Generate"

    @abstractmethod
    def sampling(self, request: Any, room: int) -> Sampling:
        """The sampling parameters of a Generate request with `room` tokens left; refuses what is set but unsupported."""

    @abstractmethod
    def aborted_ids(self, request: Any) -> Iterable[str]:
        """The request ids of an Abort request."""

    @abstractmethod
    def abort_response(self, found: int) -> Message:
        """The answer to an Abort call that ended `found` requests."""

    @abstractmethod
    def model_info(self) -> Message:
        """The answer to GetModelInfo."""

    @abstractmethod
    def server_info(self) -> Message:
        """The answer to GetServerInfo."""

    @abstractmethod
    def loads_response(self, ranks: list[RankLoad], common: Mapping[str, Any]) -> Message:
        """The answer to GetLoads; `common` are the fields that both families have."""

    def service(self) -> Service:
        """The service as a table of methods."""
        pb = self.messages
        methods = (
            server_stream("Generate", pb.GenerateRequest, self._generate),
            unary("HealthCheck", pb.HealthCheckRequest, self._health_check),
            unary("Abort", pb.AbortRequest, self._abort),
            unary("GetModelInfo", pb.GetModelInfoRequest, self._get_model_info),
            unary("GetServerInfo", pb.GetServerInfoRequest, self._get_server_info),
            unary("GetLoads", pb.GetLoadsRequest, self._get_loads),
            *(_unimplemented(name, advice) for name, advice in self.unimplemented.items()),
        )
        return Service(self.service_name, methods, self._reader.configure)

    def read(self, request: Any) -> Wanted:
        """A Generate request in neutral terms; refuses what is set but unsupported."""
        prompt = self._reader.prompt(request.tokenized.input_ids)
        return Wanted(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            sampling=self.sampling(request, self._reader.room(len(prompt))),
            n=request.sampling_params.n or 1,
            pinned_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
            is_stream=request.stream,
        )

    def model_facts(self) -> dict[str, Any]:
        """What both families say of the model, by field."""
        model = self.model
        return {
            "model_path": model.tokenizer_path or model.name,
            "tokenizer_path": model.tokenizer_path or "",
            "served_model_name": model.name,
            "max_context_length": model.max_context_tokens,
            "max_req_input_len": model.max_context_tokens - 1,
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
        }

    async def _generate(self, message: Any, context: RpcContext) -> None:
        """Errors and cancellation leave as exceptions; nothing stays live behind them."""
        call = self._reader.call(context, self._driver.clock())
        wanted = self.read(message)
        request_id = self._reader.request_id(wanted.request_id, call)
        writer = EngineWriter(self._rpc, self.layout, request_id, wanted)
        arrived = self._arrived(wanted, request_id, call, writer)
        await serve_request(self._driver, arrived, writer, call, context)

    def _arrived(self, wanted: Wanted, request_id: str, call: Call, writer: EngineWriter) -> RequestArrived:
        return RequestArrived(
            client_key=ANYONE,
            request_id=request_id,
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=wanted.sampling,
            n=wanted.n,
            pinned_rank=self._reader.pin(wanted.pinned_rank, call),
            deadline_at=self._reader.deadline_at(call, self._driver.clock()),
            tenant=call.tenant,
            cache_salt=call.cache_salt,
            queue_timeout_s=call.queue_timeout_s,
            arrived_at_unix_s=time.time(),
            sink=writer,
        )

    async def _abort(self, message: Message, _context: RpcContext) -> Message:
        """End the named requests; ids that are not live are fine."""
        found = 0
        for request_id in self.aborted_ids(message):
            request = self._driver.router.find(ANYONE, request_id)
            if request is not None:
                found += 1
                self._driver.cancel(request, Reason.ABORTED)
        return self.abort_response(found)

    async def _health_check(self, _request: Message, _context: RpcContext) -> Message:
        is_healthy, message = self.fleet.health()
        response: Message = self.messages.HealthCheckResponse(healthy=is_healthy, message=message)
        return response

    async def _get_model_info(self, _request: Message, _context: RpcContext) -> Message:
        return self.model_info()

    async def _get_server_info(self, _request: Message, _context: RpcContext) -> Message:
        return self.server_info()

    async def _get_loads(self, request: Any, _context: RpcContext) -> Message:
        loads = self.fleet.loads(request.dp_rank if request.HasField("dp_rank") else None)
        common = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": self.fleet.summary().engine_version,
            "dp_rank_count": len(loads),
            "loads": [self._load(load) for load in loads],
        }
        return self.loads_response(loads, common)

    def _load(self, load: RankLoad) -> Any:
        return self.messages.SchedulerLoad(
            dp_rank=load.rank,
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.total,
            num_used_tokens=load.used_tokens,
            max_total_num_tokens=load.max_tokens,
            max_running_requests=load.max_running,
            num_waiting_uncached_tokens=load.queued_tokens,
            token_usage=load.token_usage,
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


def _unimplemented(name: str, advice: str) -> Method:
    """The status says in words that the method is missing and what to do."""

    async def call(_data: bytes, context: RpcContext) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not implemented by this gateway; {advice}")

    return Method(name, "server_stream" if name in _STREAMS else "unary", call)
