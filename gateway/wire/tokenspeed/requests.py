"""TokenSpeed's ADD: `TokenizedGenerateReqInput`, a tagged array of which only a prefix is sent.

Layout after tokenspeed 0.1.1 (`runtime/engine/io_struct.py`); fields are only ever appended, absent
trailing ones take their defaults. Sampling travels as plain API values with `is_normalized` false:
the engine then derives its own form (top_k -1, temperature 0, ...) instead of taking ours raw.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gateway.types import EngineRequest, Sampling
from gateway.wire.common import ADD, MAX_REMEMBERED_STOPS, REMEMBERED_SAMPLINGS, as_array


class _SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """All 29 elements in declaration order. String stops and grammars need a tokenizer: not from here."""

    max_new_tokens: int
    stop: None = None
    stop_token_ids: Sequence[int] | None = None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    ignore_eos: bool
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    thinking_budget: None = None
    custom_params: None = None
    stream_interval: None = None
    logit_bias: None = None
    seed: int | None = None
    logprobs: None = None
    n: int = 1
    stop_strs: None = None
    stop_str_max_len: int = 0
    is_normalized: bool = False


class _TokenizedGenerateReqInput(
    msgspec.Struct, array_like=True, tag="TokenizedGenerateReqInput", frozen=True, kw_only=True
):
    """Tag + 10 fields. `stream` is always true: otherwise the rank holds tokens back in lots of 50."""

    rid: str
    http_worker_ipc: None = None
    input_text: None = None
    input_ids: Sequence[int]
    sampling_params: msgspec.Raw
    return_logprob: bool
    logprob_start_len: int = -1
    top_logprobs_num: int
    token_ids_logprob: None = None
    stream: bool = True


_ENCODER = msgspec.msgpack.Encoder()


def encode_add(request: EngineRequest) -> list[bytes]:
    """Frames `[00, payload]`.

    `top_logprobs_num` says what was asked; 0.1.1 serves 0 only and aborts the request otherwise, so
    the edge must have refused more. EOS needs nothing here: this engine stops at it by itself.
    """
    sampling = request.sampling
    logprobs = sampling.logprobs
    is_small = len(sampling.stop_token_ids) <= MAX_REMEMBERED_STOPS
    encode_sampling = _remembered_sampling if is_small else _encode_sampling
    message = _TokenizedGenerateReqInput(
        rid=request.wire_id,
        input_ids=as_array(request.prompt_token_ids),
        sampling_params=encode_sampling(sampling),
        return_logprob=logprobs is not None,
        top_logprobs_num=logprobs or 0,
    )
    return [ADD, _ENCODER.encode(message)]


def _encode_sampling(sampling: Sampling) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(_sampling_params(sampling)))


# Equal settings mean the same to the rank.
_remembered_sampling = lru_cache(maxsize=REMEMBERED_SAMPLINGS)(_encode_sampling)


def _sampling_params(sampling: Sampling) -> _SamplingParams:
    return _SamplingParams(
        max_new_tokens=sampling.max_tokens,
        stop_token_ids=sorted(set(sampling.stop_token_ids)) or None,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_new_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
    )
