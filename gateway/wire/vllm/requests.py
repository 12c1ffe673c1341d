"""vLLM's ADD: `EngineCoreRequest`, an untagged array of which only a prefix is sent.

Positions after vLLM 0.24 to 0.32 (`vllm/v1/engine/__init__.py`). Releases insert fields in the
middle of this array: 0-13 are the same in all of them, the rest is not and has defaults for us, so
14 elements are sent and real 0.28 and 0.32 cores took them. The rank validates sampling inside its
decoder and goes deaf on a bad value: nothing unvalidated may reach `encode_add`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from gateway.types import EngineRequest, Sampling
from gateway.wire.common import ADD, MAX_REMEMBERED_STOPS, REMEMBERED_SAMPLINGS, as_array

_SAMPLING_DEFAULTS: Final[dict[str, object]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "seed": None,
    "logprobs": None,
    "stop_token_ids": [],
    "ignore_eos": False,
    "_eos_token_id": None,
    "_all_stop_token_ids": [],
}
"""vLLM's own: the map is sparse and leaves these out. `max_tokens` (16) and `detokenize` (true) always go."""


class _EngineCoreRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Positions 0-13. The ROUTER identity has chosen the rank, so `data_parallel_rank` is left out."""

    request_id: str
    prompt_token_ids: Sequence[int]
    mm_features: None = None
    sampling_params: msgspec.Raw
    pooling_params: None = None
    arrival_time: float
    lora_request: None = None
    cache_salt: None = None
    data_parallel_rank: None = None
    prompt_embeds: None = None
    prompt_is_token_ids: None = None
    client_index: int
    current_wave: int = 0
    priority: int


_ALWAYS_SENT: Final = object()
_ENCODER = msgspec.msgpack.Encoder()


def encode_add(request: EngineRequest, client_index: int) -> list[bytes]:
    """Frames `[00, payload]`. `priority` goes out as it is: vLLM serves smaller numbers first, if at all."""
    sampling = request.sampling
    is_small = len(sampling.stop_token_ids) <= MAX_REMEMBERED_STOPS
    encode_sampling = _remembered_sampling if is_small else _encode_sampling
    message = _EngineCoreRequest(
        request_id=request.wire_id,
        prompt_token_ids=as_array(request.prompt_token_ids),
        sampling_params=encode_sampling(sampling, request.eos_token_ids),
        arrival_time=float(request.arrived_at_unix_s),
        client_index=client_index,
        current_wave=request.current_wave,
        priority=request.priority,
    )
    return [ADD, _ENCODER.encode(message)]


def _encode_sampling(sampling: Sampling, eos_token_ids: Sequence[int]) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(_sampling_params(sampling, eos_token_ids)))


# Equal settings mean the same to the rank.
_remembered_sampling = lru_cache(maxsize=REMEMBERED_SAMPLINGS)(_encode_sampling)


def _sampling_params(sampling: Sampling, eos_token_ids: Sequence[int]) -> dict[str, object]:
    """Add what vLLM's own front end adds: an engine core has no tokenizer and knows no EOS.

    The first EOS id stops as `_eos_token_id`, the others as `stop_token_ids`; `_all_stop_token_ids`
    stops nothing, it is what `min_tokens` masks, and holds the EOS ids even when they are ignored.
    """
    stop_ids = set(sampling.stop_token_ids)
    eos_token_id = None
    if eos_token_ids and not sampling.ignore_eos:
        eos_token_id = eos_token_ids[0]
        stop_ids |= set(eos_token_ids[1:]) - {eos_token_id}
    params: dict[str, object] = {
        "max_tokens": sampling.max_tokens,
        "detokenize": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": sampling.ignore_eos,
        "_eos_token_id": eos_token_id,
        "_all_stop_token_ids": sorted(stop_ids | set(eos_token_ids)),
    }
    return {name: value for name, value in params.items() if value != _SAMPLING_DEFAULTS.get(name, _ALWAYS_SENT)}
