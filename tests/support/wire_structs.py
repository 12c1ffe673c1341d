"""The engines' own message types, declared again from their documented layouts and independent of the codecs.

Strict where the engine is strict: an ADD that decodes here would be taken by the rank.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class TokenSpeedSampling(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """SamplingParams of tokenspeed 0.1.1: 29 elements."""

    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    thinking_budget: int | None = None
    custom_params: dict[str, str] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop_strs: str | list[str] | None = None
    stop_str_max_len: int = 0
    is_normalized: bool = False


class TokenizedGenerateReqInput(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """The request of tokenspeed 0.1.1: tag + 24 fields."""

    rid: str | list[str] | None = None
    http_worker_ipc: str | None = None
    input_text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: TokenSpeedSampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False
    input_embeds: list[list[float]] | None = None
    session_params: list[str] | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool = False
    created_time: float = 0.0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    input_multi_ids: list[int] | None = None
    input_extra_infos: list[dict[str, str]] | None = None
    input_ids_unpadded: list[int] | None = None
    multimodal_inputs: dict[str, str] | None = None
    validation_error: str | None = None
    data_parallel_rank: int | None = None


class VllmSampling(msgspec.Struct, forbid_unknown_fields=True):
    """SamplingParams of vLLM 0.32.0 as a map, with the checks that its decoder makes."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: int = 0
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: set[int] = msgspec.field(default_factory=set, name="_all_stop_token_ids")
    bad_words: list[str] = []
    skip_reading_prefix_cache: bool | None = None
    watermarking: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: dict[str, str] | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """The request of vLLM 0.32.0: 22 elements, the first nine required."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[dict[str, str]] | None
    sampling_params: VllmSampling | None
    pooling_params: dict[str, str] | None
    arrival_time: float
    lora_request: list[str] | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: list[float] | None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, str] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: dict[str, str] | None = None
