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
from google.protobuf.message import DecodeError, Message

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.edges.driver import Driver
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_direct import generate_method
from gateway.edges.grpc_engine.cut import cut
from gateway.edges.grpc_engine.encode import Layout
from gateway.edges.grpc_engine.fleet import FleetView, RankLoad
from gateway.edges.grpc_engine.writer import EngineWriter, Wanted
from gateway.edges.grpc_memo import keep
from gateway.edges.grpc_methods import Method, Service, decode, unary
from gateway.edges.grpc_request import ANYONE, NO_MAX_TOKENS, Call, RequestReader
from gateway.types import Sampling

NO_MEDIA = "multimodal input is not supported; send a text-only prompt"
NO_GRAMMAR = "structured output is not supported; leave it unset"
NO_PD = "disaggregated prefill and decode are not supported; leave it unset"
NO_STOP_STRINGS = "ranks match token ids only; use stop_token_ids, or match strings where the text is made"
"""What to do about fields that neither family's ranks can honour; see `refuse`."""

_STREAMS: Final = ("GetTokenizer", "SubscribeKvEvents")


Options = tuple[Sampling, int, int | None, bool]
"""Of a `Wanted` all but the request id and the prompt."""


class EngineService(ABC):
    """One family's service. What a request means and how the ranks are summed up is here; messages are the family's.

    `messages` is the generated module, whose names both families share; `unimplemented` maps methods that the gateway
    does not have (yet) to what to do instead, "" where nothing does the same.
    """

    layout: ClassVar[Layout]
    service_name: ClassVar[str]
    messages: ClassVar[Any]
    unimplemented: ClassVar[dict[str, str]] = {
        "FlushCache": "restart the ranks instead",
        "StartProfile": "profile the engine directly",
        "StopProfile": "profile the engine directly",
        "GetTokenizer": "load it from the path that GetModelInfo names",
        "SubscribeKvEvents": "",
    }

    def __init__(self, config: Config, driver: Driver) -> None:
        self.model = config.model
        self.fleet = FleetView(config, driver)
        self._driver = driver
        self._reader = RequestReader(config)
        # By what a message is without its request id and prompt.
        self._options: dict[bytes, Options] = {}
        self._read_tokenized = self.messages.TokenizedInput.FromString
        self._rpc = f"{self.service_name}/Generate"

    @abstractmethod
    def sampling(self, request: Any) -> Sampling:
        """The sampling parameters of a Generate request, NO_MAX_TOKENS for absent ones; refuses what is unsupported.

        Nothing but the message may make a difference, and not its request id or prompt: the answer is remembered.
        """

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
        missing = self.unimplemented
        if self.model.tokenizer_path is None:
            # GetModelInfo's path is only the model's name then.
            missing = missing | {"GetTokenizer": "set model.tokenizer_path, and load it from there"}
        methods = (
            generate_method(self._driver, self._reader, self._prepare),
            unary("HealthCheck", pb.HealthCheckRequest, self._health_check),
            unary("Abort", pb.AbortRequest, self._abort),
            unary("GetModelInfo", pb.GetModelInfoRequest, self._get_model_info),
            unary("GetServerInfo", pb.GetServerInfoRequest, self._get_server_info),
            unary("GetLoads", pb.GetLoadsRequest, self._get_loads),
            *(_unimplemented(name, advice) for name, advice in missing.items()),
        )
        return Service(self.service_name, methods, self._reader.configure)

    def read(self, request: Any) -> Wanted:
        """A Generate request in neutral terms; refuses what is set but unsupported. Takes the message apart."""
        reader = self._reader
        request_id: str = request.request_id
        prompt = reader.prompt(request.tokenized.input_ids)
        request.ClearField("request_id")
        request.ClearField("tokenized")
        # Whoever sends many requests sends the rest of them again and again.
        key = request.SerializeToString()
        sampling, n, pinned_rank, is_stream = self._options.get(key) or self._read_options(key, request)
        if sampling.max_tokens == NO_MAX_TOKENS:
            sampling = reader.with_room(sampling, len(prompt))
        return Wanted(request_id, prompt, sampling, n, pinned_rank, is_stream)

    def _read_known(self, data: bytes) -> Wanted | None:
        """The same from a message's bytes, where all but id and prompt was seen before. None: take it apart.

        What is kept by was written by the library from messages without these two: an equal rest has neither.
        """
        parts = cut(data)
        options = None if parts is None else self._options.get(parts[2])
        if parts is None or options is None:
            return None
        try:
            prompt = self._reader.prompt(self._read_tokenized(parts[1]).input_ids)
        except DecodeError:
            return None
        sampling, n, pinned_rank, is_stream = options
        if sampling.max_tokens == NO_MAX_TOKENS:
            sampling = self._reader.with_room(sampling, len(prompt))
        return Wanted(parts[0], prompt, sampling, n, pinned_rank, is_stream)

    def _read_options(self, key: bytes, request: Any) -> Options:
        pinned_rank = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        options = self.sampling(request), request.sampling_params.n or 1, pinned_rank, request.stream
        keep(self._options, key, options)
        return options

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

    def _prepare(self, data: bytes, call: Call, now: float) -> RequestArrived:
        reader = self._reader
        wanted = self._read_known(data) or self.read(decode(self.messages.GenerateRequest, data))
        request_id = reader.request_id(wanted.request_id, call)
        pinned_rank, deadline_at = wanted.pinned_rank, call.deadline_at
        return RequestArrived(
            client_key=ANYONE,
            request_id=request_id,
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=wanted.sampling,
            n=wanted.n,
            pinned_rank=pinned_rank if call.pinned_rank is None else reader.pin(pinned_rank, call),
            deadline_at=reader.deadline_at(call, now) if deadline_at is None else deadline_at,
            tenant=call.tenant,
            cache_salt=call.cache_salt,
            queue_timeout_s=call.queue_timeout_s,
            arrived_at_unix_s=time.time(),
            sink=EngineWriter(self._rpc, self.layout, request_id, wanted),
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
    """The status says in words that the method is missing and what to do, if anything."""
    text = f"{name} is not implemented by this gateway" + (f"; {advice}" if advice else "")

    async def call(_data: bytes, context: RpcContext) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    return Method(name, "server_stream" if name in _STREAMS else "unary", call)
