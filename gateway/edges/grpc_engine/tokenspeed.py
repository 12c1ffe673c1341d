"""`tokenspeed.grpc.scheduler.TokenSpeedScheduler`, as smg-grpc-proto 0.4.28 declares it."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_engine.common import NO_GRAMMAR, NO_MEDIA, NO_PD, NO_STOP_STRINGS, EngineService, refuse
from gateway.edges.grpc_engine.encode import TOKENSPEED
from gateway.edges.grpc_engine.fleet import RankLoad
from gateway.edges.grpc_request import NO_MAX_TOKENS
from gateway.types import Sampling

UNSUPPORTED_REQUEST = {
    "token_ids_logprob": "log probabilities of chosen ids are not available from these ranks; leave it empty",
    "top_logprobs_num": "alternatives are not available from these ranks; use return_logprob alone",
    "mm_inputs": NO_MEDIA,
    "encode_bootstrap_info": NO_PD,
    "kv_bootstrap_info": NO_PD,
}
UNSUPPORTED_SAMPLING = {
    "stop": NO_STOP_STRINGS,
    "logit_bias": "is not supported; leave it empty",
    "regex": NO_GRAMMAR,
    "json_schema": NO_GRAMMAR,
    "ebnf_grammar": NO_GRAMMAR,
    "structural_tag": NO_GRAMMAR,
    "custom_params": "engine-specific parameters are not passed on; leave it unset",
}
IGNORED = {
    "TokenizedInput": ("original_text",),
    # These act where token ids become text, which is the client's side of this service.
    "SamplingParams": ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
}
"""Fields without effect on token ids. Every other field is honoured or refused; a test walks the protos."""


class TokenSpeedService(EngineService):
    """The messages of this family."""

    layout = TOKENSPEED
    service_name = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
    messages: ClassVar[Any] = pb

    def sampling(self, request: Any) -> Sampling:
        """The sampling parameters of a `GenerateRequest`."""
        refuse(request, UNSUPPORTED_REQUEST)
        refuse(request.sampling_params, UNSUPPORTED_SAMPLING, "sampling_params.")
        if request.HasField("logprob_start_len") and request.logprob_start_len >= 0:
            raise GatewayError(
                Reason.UNSUPPORTED_FIELD,
                "logprob_start_len: log probabilities of the prompt are not available; leave it unset or send -1",
                field="logprob_start_len",
            )
        return _sampling(request)

    def aborted_ids(self, request: Any) -> Iterable[str]:
        """The one id of an `AbortRequest`."""
        return (request.request_id,)

    def abort_response(self, found: int) -> Message:
        """An unknown id is no failure."""
        return pb.AbortResponse(success=True, message="aborted" if found else "no live request has this id")

    def model_info(self) -> Message:
        """The model as configured, and the type that the ranks reported."""
        return pb.GetModelInfoResponse(**self.model_facts(), model_dtype=self.fleet.summary().dtype)

    def server_info(self) -> Message:
        """All ranks as one engine."""
        fleet = self.fleet.summary()
        # `dp_size` is the key that a router reads to address the ranks one by one.
        server_args = Struct()
        server_args.update({"dp_size": fleet.ranks, "served_model_name": self.model.name})
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

    def loads_response(self, ranks: list[RankLoad], common: Mapping[str, Any]) -> Message:
        """The ranks' loads and their sums."""
        aggregate = pb.AggregateMetrics(
            total_running_reqs=sum(load.running for load in ranks),
            total_waiting_reqs=sum(load.waiting for load in ranks),
            total_reqs=sum(load.total for load in ranks),
            avg_token_usage=sum(load.token_usage for load in ranks) / len(ranks),
        )
        return pb.GetLoadsResponse(aggregate=aggregate, **common)


def _sampling(request: Any) -> Sampling:
    """Optional scalars: absent means the API's default, an explicit 0 is the client's 0."""
    params = request.sampling_params

    def get(field: str, default: Any) -> Any:
        return getattr(params, field) if params.HasField(field) else default

    return Sampling(
        max_tokens=get("max_new_tokens", NO_MAX_TOKENS),
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
