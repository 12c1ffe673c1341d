"""`vllm.grpc.engine.VllmEngine`, as smg-grpc-proto 0.4.28 declares it."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from gateway.config.schema import Config
from gateway.edges.driver import Driver
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_engine.common import Engine, Wanted, refuse, unimplemented
from gateway.edges.grpc_engine.encode import VLLM
from gateway.edges.grpc_engine.fleet import FleetView, RankLoad
from gateway.edges.grpc_methods import Method, Service, server_stream, unary
from gateway.edges.grpc_request import RequestReader
from gateway.types import Sampling

_NO_MEDIA = "multimodal input is not supported; send a text-only prompt"
_NO_GRAMMAR = "structured output is not supported; leave it unset"
_NO_PD = "disaggregated prefill and decode are not supported; leave it unset"

UNSUPPORTED_REQUEST = {
    "text": "the gateway does not tokenize; send tokenized.input_ids",
    "kv_transfer_params": _NO_PD,
    "kv_transfer_params_json": _NO_PD,
    "mm_inputs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
}
UNSUPPORTED_SAMPLING = {
    "stop": "ranks match token ids only; use stop_token_ids, or match strings where the text is made",
    "prompt_logprobs": "log probabilities of the prompt are not available; leave it unset",
    "logit_bias": "is not supported; leave it empty",
    "truncate_prompt_tokens": "is not supported; truncate the prompt before sending it",
    "grammar_from_first_token": _NO_GRAMMAR,
    "json_schema": _NO_GRAMMAR,
    "regex": _NO_GRAMMAR,
    "grammar": _NO_GRAMMAR,
    "structural_tag": _NO_GRAMMAR,
    "json_object": _NO_GRAMMAR,
    "choice": _NO_GRAMMAR,
}
IGNORED = {
    "TokenizedInput": ("original_text",),
    # These act where token ids become text, which is the client's side of this service.
    "SamplingParams": ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
}
"""Fields without effect on token ids. Every other field is honoured or refused; a test walks the protos."""


class VllmService:
    """Maps the messages; `common.Engine` does the work."""

    layout = VLLM
    service_name = "vllm.grpc.engine.VllmEngine"

    def __init__(self, config: Config, driver: Driver) -> None:
        self._model = config.model
        self._engine = Engine(config, driver, self)
        self._fleet = FleetView(config, driver)

    def service(self) -> Service:
        """The service as a table of methods."""
        methods: tuple[Method, ...] = (
            server_stream("Generate", pb.GenerateRequest, self._engine.generate),
            unary("HealthCheck", pb.HealthCheckRequest, self._health_check),
            unary("Abort", pb.AbortRequest, self._abort),
            unary("GetModelInfo", pb.GetModelInfoRequest, self._get_model_info),
            unary("GetServerInfo", pb.GetServerInfoRequest, self._get_server_info),
            unary("GetLoads", pb.GetLoadsRequest, self._get_loads),
            unimplemented("Embed", "unary", "it serves generation only"),
            unimplemented("FlushCache", "unary", "restart the ranks instead"),
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
        prompt = request.tokenized.input_ids[:]
        return Wanted(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            sampling=_sampling(request.sampling_params, reader.room(len(prompt))),
            n=request.sampling_params.n or 1,
            pinned_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
            is_stream=request.stream,
        )

    def aborted_ids(self, request: Any) -> Iterable[str]:
        """The ids of an `AbortRequest`."""
        return tuple(request.request_ids)

    async def _health_check(self, _request: Message, _context: RpcContext) -> Message:
        is_healthy, message = self._fleet.health()
        return pb.HealthCheckResponse(healthy=is_healthy, message=message)

    async def _abort(self, request: Message, _context: RpcContext) -> Message:
        await self._engine.abort(request)
        return pb.AbortResponse()

    async def _get_model_info(self, _request: Message, _context: RpcContext) -> Message:
        model = self._model
        return pb.GetModelInfoResponse(
            model_path=model.tokenizer_path or model.name,
            is_generation=True,
            max_context_length=model.max_context_tokens,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=model.tokenizer_path or "",
            eos_token_ids=model.eos_token_ids,
            max_req_input_len=model.max_context_tokens - 1,
        )

    async def _get_server_info(self, _request: Message, _context: RpcContext) -> Message:
        fleet = self._fleet.summary()
        return pb.GetServerInfoResponse(
            active_requests=fleet.live_requests,
            uptime_seconds=fleet.uptime_s,
            server_type="vllm-grpc",
            data_parallel_size=fleet.ranks,
            block_size=fleet.block_size,
            model_dtype=fleet.dtype,
            max_num_seqs=fleet.max_num_seqs,
        )

    async def _get_loads(self, request: Any, _context: RpcContext) -> Message:
        loads = self._fleet.loads(request.dp_rank if request.HasField("dp_rank") else None)
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._fleet.summary().engine_version,
            dp_rank_count=len(loads),
            loads=[_load(load) for load in loads],
        )


def _sampling(params: Any, room: int) -> Sampling:
    """Plain scalars: 0 is what an unset field reads as, so it means the API's default."""
    return Sampling(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else room,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        min_tokens=params.min_tokens,
        seed=params.seed if params.HasField("seed") else None,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
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
        token_usage=load.token_usage,
        max_running_requests=load.max_running,
        num_waiting_uncached_tokens=load.queued_tokens,
    )
