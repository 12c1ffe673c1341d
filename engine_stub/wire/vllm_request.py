"""vLLM's ADD: declaration, and what each bad one does to a real rank.

| input | a real engine core (0.32) |
|---|---|
| undecodable, wrong type, sampling values out of range, n > 1 greedy, stop strings without detokenizer | input thread dies: deaf |
| token id outside the vocabulary, prompt empty or longer than the context, id already in flight | dead, with the sentinel |
| client index without an output socket | output thread dies: mute |
| neither sampling nor pooling parameters, no max_tokens, structured output without a tokenizer | finish reason 3 for that request |
"""

from typing import Any

import msgspec

from engine_stub.config import StubConfig
from engine_stub.scheduler.sequence import NO_IDS, Request, Sampling
from engine_stub.wire.codec import Add, Consequence, Problem

_GREEDY_BELOW = 1e-5


class SamplingParams(msgspec.Struct, kw_only=True):
    """The sparse sampling map: absent means default, unknown keys are ignored."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: list[int] | None = msgspec.field(default=None, name="_all_stop_token_ids")


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """The first 9 elements are required; 0.32 has 22."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None
    sampling_params: SamplingParams | None
    pooling_params: dict[str, Any] | None
    arrival_time: float
    lora_request: list[Any] | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: dict[str, Any] | None = None


def to_add(message: EngineCoreRequest, config: StubConfig) -> Add:
    """The request that the scheduler runs, with the problem that keeps it from it."""
    prompt = message.prompt_token_ids or []
    params = message.sampling_params or SamplingParams()
    room = config.max_model_len - len(prompt)
    request = Request(
        id=message.request_id,
        prompt_ids=prompt,
        max_tokens=max(1, min(params.max_tokens or room, room)),
        min_tokens=params.min_tokens,
        eos_ids=NO_IDS if params.ignore_eos or params.eos_token_id is None else frozenset((params.eos_token_id,)),
        stop_ids=frozenset(params.stop_token_ids or ()),
        seed=params.seed,
        logprobs=params.logprobs,
        sampling=_sampling(params),
        uses_prefix_cache=not params.skip_reading_prefix_cache,
        cache_salt=message.cache_salt or "",
        client=message.client_index,
    )
    return Add(request, _problem(message, config), message.current_wave)


def _sampling(params: SamplingParams) -> Sampling:
    is_warm = params.temperature >= _GREEDY_BELOW  # false for NaN
    return Sampling(
        temperature=params.temperature if is_warm else 0.0,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


def _problem(message: EngineCoreRequest, config: StubConfig) -> Problem | None:
    params = message.sampling_params
    reason = None if params is None else _deafening(params)
    if reason is not None:
        return Problem(reason, Consequence.DEAF)
    reason = _deadly(message, config)
    if reason is not None:
        return Problem(reason, Consequence.DEAD)
    if params is None:
        what = "pooling" if message.pooling_params is not None else "neither sampling nor pooling parameters"
        return Problem(f"{what}: this rank only generates", Consequence.REFUSED)
    if params.max_tokens is None:
        return Problem("max_tokens is not set", Consequence.REFUSED)
    if params.structured_outputs is not None:
        return Problem("structured output needs a tokenizer", Consequence.REFUSED)
    return None


def _deafening(params: SamplingParams) -> str | None:
    """What sampling validation inside the real decoder raises on."""
    checks = (
        (params.n >= 1, f"n must be at least 1, got {params.n}"),
        (params.n == 1 or params.temperature >= _GREEDY_BELOW, f"n={params.n} with greedy sampling"),
        (-2 <= params.presence_penalty <= 2, "presence_penalty must be in [-2, 2]"),
        (-2 <= params.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]"),
        (params.repetition_penalty > 0, "repetition_penalty must be positive"),
        (0 <= params.temperature <= 2, f"temperature must be in [0, 2], got {params.temperature}"),
        (0 < params.top_p <= 1, f"top_p must be in (0, 1], got {params.top_p}"),
        (params.top_k >= -1, f"top_k must be 0 or -1 (off) or at least 1, got {params.top_k}"),
        (0 <= params.min_p <= 1, f"min_p must be in [0, 1], got {params.min_p}"),
        (
            params.max_tokens is None or params.max_tokens >= 1,
            f"max_tokens must be at least 1, got {params.max_tokens}",
        ),
        (0 <= params.min_tokens <= (params.max_tokens or params.min_tokens), "min_tokens is out of range"),
        (params.logprobs is None or params.logprobs >= 0, "logprobs must not be negative"),
        (not params.stop or params.detokenize, "stop strings need the detokenizer"),
    )
    return next((reason for is_fine, reason in checks if not is_fine), None)


def _deadly(message: EngineCoreRequest, config: StubConfig) -> str | None:
    """What the real scheduler or model runner fails on; a duplicate id is found by the scheduler."""
    prompt, vocab_size = message.prompt_token_ids, config.model.vocab_size
    if not prompt:
        return "the prompt is empty"
    if len(prompt) > config.max_model_len:
        return f"a prompt of {len(prompt)} tokens is longer than the context of {config.max_model_len}"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"a prompt id is outside the vocabulary of {vocab_size}"
    allowed = message.sampling_params.allowed_token_ids if message.sampling_params is not None else None
    if allowed and (min(allowed) < 0 or max(allowed) >= vocab_size):
        return f"an allowed id is outside the vocabulary of {vocab_size}"
    return None
