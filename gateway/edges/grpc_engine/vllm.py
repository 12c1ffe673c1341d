"""`vllm.grpc.engine.VllmEngine`, as smg-grpc-proto 0.4.28 declares it."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from gateway.edges.grpc_engine.common import NO_GRAMMAR, NO_MEDIA, NO_PD, NO_STOP_STRINGS, EngineService, refuse
from gateway.edges.grpc_engine.encode import VLLM
from gateway.edges.grpc_engine.fleet import RankLoad
from gateway.edges.grpc_request import NO_MAX_TOKENS
from gateway.types import Sampling

UNSUPPORTED_REQUEST = {
    "text": "the gateway does not tokenize; send tokenized.input_ids",
    "kv_transfer_params": NO_PD,
    "kv_transfer_params_json": NO_PD,
    "mm_inputs": NO_MEDIA,
    "extra_mm_inputs": NO_MEDIA,
    "media_refs": NO_MEDIA,
}
UNSUPPORTED_SAMPLING = {
    "stop": NO_STOP_STRINGS,
    "prompt_logprobs": "log probabilities of the prompt are not available; leave it unset",
    "logit_bias": "is not supported; leave it empty",
    "truncate_prompt_tokens": "is not supported; truncate the prompt before sending it",
    "grammar_from_first_token": NO_GRAMMAR,
    "json_schema": NO_GRAMMAR,
    "regex": NO_GRAMMAR,
    "grammar": NO_GRAMMAR,
    "structural_tag": NO_GRAMMAR,
    "json_object": NO_GRAMMAR,
    "choice": NO_GRAMMAR,
}
IGNORED = {
    "TokenizedInput": ("original_text",),
    # These act where token ids become text, which is the client's side of this service.
    "SamplingParams": ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
}
"""Fields without effect on token ids. Every other field is honoured or refused; a test walks the protos."""


class VllmService(EngineService):
    """The messages of this family."""

    layout = VLLM
    service_name = "vllm.grpc.engine.VllmEngine"
    messages: ClassVar[Any] = pb
    unimplemented: ClassVar[dict[str, str]] = EngineService.unimplemented | {"Embed": "it serves generation only"}

    def sampling(self, request: Any) -> Sampling:
        """The sampling parameters of a `GenerateRequest`."""
        refuse(request, UNSUPPORTED_REQUEST)
        refuse(request.sampling_params, UNSUPPORTED_SAMPLING, "sampling_params.")
        return _sampling(request.sampling_params)

    def aborted_ids(self, request: Any) -> Iterable[str]:
        """The ids of an `AbortRequest`."""
        return tuple(request.request_ids)

    def abort_response(self, found: int) -> Message:  # noqa: ARG002 - this family's answer is empty
        """Always the same."""
        return pb.AbortResponse()

    def model_info(self) -> Message:
        """The model as configured."""
        return pb.GetModelInfoResponse(**self.model_facts(), is_generation=True)

    def server_info(self) -> Message:
        """All ranks as one engine."""
        fleet = self.fleet.summary()
        return pb.GetServerInfoResponse(
            active_requests=fleet.live_requests,
            uptime_seconds=fleet.uptime_s,
            server_type="vllm-grpc",
            data_parallel_size=fleet.ranks,
            block_size=fleet.block_size,
            model_dtype=fleet.dtype,
            max_num_seqs=fleet.max_num_seqs,
        )

    def loads_response(self, ranks: list[RankLoad], common: Mapping[str, Any]) -> Message:  # noqa: ARG002 - `common` has them
        """The ranks' loads; this family has no sums."""
        return pb.GetLoadsResponse(**common)


def _sampling(params: Any) -> Sampling:
    """Plain scalars: 0 is what an unset field reads as, so it means the API's default."""
    return Sampling(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else NO_MAX_TOKENS,
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
