"""`tokenspeed.grpc.scheduler.TokenSpeedScheduler`, as smg-grpc-proto 0.4.28 declares it."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.edges.driver import Driver
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_engine.common import Engine, Wanted, refuse, unimplemented
from gateway.edges.grpc_engine.encode import TOKENSPEED
from gateway.edges.grpc_engine.fleet import FleetView, RankLoad
from gateway.edges.grpc_methods import Method, Service, server_stream, unary
from gateway.edges.grpc_request import RequestReader
from gateway.types import Sampling

_NO_MEDIA = "multimodal input is not supported; send a text-only prompt"
_NO_GRAMMAR = "structured output is not supported; leave it unset"
_NO_PD = "disaggregated prefill and decode are not supported; leave it unset"

UNSUPPORTED_REQUEST = {
    "token_ids_logprob": "log probabilities of chosen ids are not available from these ranks; leave it empty",
    "top_logprobs_num": "alternatives are not available from these ranks; use return_logprob alone",
    "mm_inputs": _NO_MEDIA,
    "encode_bootstrap_info": _NO_PD,
    "kv_bootstrap_info": _NO_PD,
}
UNSUPPORTED_SAMPLING = {
    "stop": "ranks match token ids only; use stop_token_ids, or match strings where the text is made",
    "logit_bias": "is not supported; leave it empty",
    "regex": _NO_GRAMMAR,
    "json_schema": _NO_GRAMMAR,
    "ebnf_grammar": _NO_GRAMMAR,
    "structural_tag": _NO_GRAMMAR,
    "custom_params": "engine-specific parameters are not passed on; leave it unset",
}
IGNORED = {
    "TokenizedInput": ("original_text",),
    # These act where token ids become text, which is the client's side of this service.
    "SamplingParams": ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
}
"""Fields without effect on token ids. Every other field is honoured or refused; a test walks the protos."""


class TokenSpeedService:
    """Maps the messages; `common.Engine` does the work."""

    layout = TOKENSPEED
    service_name = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"

    def __init__(self, config: Config, driver: Driver) -> None:
        self._model = config.model
        self._engine = Engine(config, driver, self)
        self._fleet = FleetView(config, driver)

    def service(self) -> Service:
        """The service as a table of methods."""
        no_reset = "restart the ranks instead"
        methods: tuple[Method, ...] = (
            server_stream("Generate", pb.GenerateRequest, self._engine.generate),
            unary("HealthCheck", pb.HealthCheckRequest, self._health_check),
            unary("Abort", pb.AbortRequest, self._abort),
            unary("GetModelInfo", pb.GetModelInfoRequest, self._get_model_info),
            unary("GetServerInfo", pb.GetServerInfoRequest, self._get_server_info),
            unary("GetLoads", pb.GetLoadsRequest, self._get_loads),
            unimplemented("FlushCache", "unary", no_reset),
            unimplemented("StartProfile", "unary", "profile the engine directly"),
            unimplemented("StopProfile", "unary", "profile the engine directly"),
            unimplemented("GetTokenizer", "server_stream", "load it from the path that GetModelInfo names"),
            unimplemented("SubscribeKvEvents", "server_stream", "poll GetLoads instead"),
        )
        return Service(self.service_name, methods)

    def read(self, request: Any, reader: RequestReader) -> Wanted:
        """A `GenerateRequest` in neutral terms."""
        refuse(request, UNSUPPORTED_REQUEST)
        refuse(request.sampling_params, UNSUPPORTED_SAMPLING, "sampling_params.")
        if request.HasField("logprob_start_len") and request.logprob_start_len >= 0:
            raise GatewayError(
                Reason.UNSUPPORTED_FIELD,
                "logprob_start_len: log probabilities of the prompt are not available; leave it unset or send -1",
                field="logprob_start_len",
            )
        prompt = request.tokenized.input_ids[:]
        return Wanted(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            sampling=_sampling(request, reader.room(len(prompt))),
            n=request.sampling_params.n or 1,
            pinned_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
            is_stream=request.stream,
        )

    def aborted_ids(self, request: Any) -> Iterable[str]:
        """The one id of an `AbortRequest`."""
        return (request.request_id,)

    async def _health_check(self, _request: Message, _context: RpcContext) -> Message:
        is_healthy, message = self._fleet.health()
        return pb.HealthCheckResponse(healthy=is_healthy, message=message)

    async def _abort(self, request: Message, _context: RpcContext) -> Message:
        found = await self._engine.abort(request)
        return pb.AbortResponse(success=True, message="aborted" if found else "no live request has this id")

    async def _get_model_info(self, _request: Message, _context: RpcContext) -> Message:
        model = self._model
        return pb.GetModelInfoResponse(
            model_path=model.tokenizer_path or model.name,
            tokenizer_path=model.tokenizer_path or "",
            served_model_name=model.name,
            max_context_length=model.max_context_tokens,
            max_req_input_len=model.max_context_tokens - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            model_dtype=self._fleet.summary().dtype,
        )

    async def _get_server_info(self, _request: Message, _context: RpcContext) -> Message:
        fleet = self._fleet.summary()
        # `dp_size` is the key that a router reads to address the ranks one by one.
        server_args = Struct()
        server_args.update({"dp_size": fleet.ranks, "served_model_name": self._model.name})
        scheduler_info = Struct()
        scheduler_info.update({"max_total_num_tokens": fleet.max_tokens, "max_running_requests": fleet.max_num_seqs})
        started = Timestamp()
        started.FromNanoseconds(round(fleet.started_at_unix_s * 1e9))
        return pb.GetServerInfoResponse(
            server_args=server_args,
            scheduler_info=scheduler_info,
            active_requests=fleet.live_requests,
            uptime_seconds=fleet.uptime_s,
            max_total_num_tokens=fleet.max_tokens,
            tokenspeed_version=fleet.engine_version.removeprefix("tokenspeed-"),
            start_time=started,
        )

    async def _get_loads(self, request: Any, _context: RpcContext) -> Message:
        loads = self._fleet.loads(request.dp_rank if request.HasField("dp_rank") else None)
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._fleet.summary().engine_version,
            dp_rank_count=len(loads),
            loads=[_load(load) for load in loads],
            aggregate=pb.AggregateMetrics(
                total_running_reqs=sum(load.running for load in loads),
                total_waiting_reqs=sum(load.waiting for load in loads),
                total_reqs=sum(load.total for load in loads),
                avg_token_usage=sum(load.token_usage for load in loads) / len(loads),
            ),
        )


def _sampling(request: Any, room: int) -> Sampling:
    """Optional scalars: absent means the API's default, an explicit 0 is the client's 0."""
    params = request.sampling_params

    def get(field: str, default: Any) -> Any:
        return getattr(params, field) if params.HasField(field) else default

    return Sampling(
        max_tokens=get("max_new_tokens", room),
        temperature=get("temperature", 1.0),
        top_p=get("top_p", 1.0),
        top_k=get("top_k", -1),
        min_p=get("min_p", 0.0),
        frequency_penalty=get("frequency_penalty", 0.0),
        presence_penalty=get("presence_penalty", 0.0),
        repetition_penalty=get("repetition_penalty", 1.0),
        min_tokens=params.min_new_tokens,
        seed=get("sampling_seed", None),
        logprobs=0 if request.return_logprob else None,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def _load(load: RankLoad) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(
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
