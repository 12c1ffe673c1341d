"""TokenSpeed 0.1.1's msgpack wire, engine side.

Requests and batches are tagged positional arrays: element 0 is the class name, then the fields in
declaration order. Layouts only grow at the end; short arrays take the defaults, long ones are cut.
A message is one type byte and one payload; what can't be read is logged and dropped, what can't be
served is answered by a terminal `abort` row (its text stays in the engine's log).
"""

from typing import Any

import msgspec

from engine_stub.config import LoadSemantics, SnapshotTiming, StubConfig
from engine_stub.faults import WireForm
from engine_stub.scheduler.plan import Rows
from engine_stub.scheduler.sequence import NO_IDS, Finish, Request, Sampling, Sequence
from engine_stub.wire.codec import (
    ABORT,
    ADD,
    Abort,
    Add,
    Consequence,
    Load,
    Malformed,
    Message,
    Problem,
    RankCard,
    Utility,
)
from engine_stub.wire.foreign import foreign, is_vllm_add
from engine_stub.wire.handshake import Status

STREAM_OFF_INTERVAL = 50
"""Without `stream` the engine reports the first token, then every 50th, and the finish."""

_MIN_NORMALIZED_TEMPERATURE = 1e-6


class SamplingParams(msgspec.Struct, array_like=True):
    """The 29 positional sampling fields. `is_normalized` claims that the sender derived them itself."""

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
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop_strs: str | list[str] | None = None
    stop_str_max_len: int = 0
    is_normalized: bool = False


class TokenizedGenerateReqInput(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """An ADD. 11 elements are enough for text; the last field exists in the 0.1.1 wheel only."""

    rid: str | list[str] | None = None
    http_worker_ipc: str | None = None
    input_text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False
    input_embeds: list[Any] | None = None
    session_params: list[Any] | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool = False
    created_time: float = 0.0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    input_multi_ids: list[Any] | None = None
    input_extra_infos: list[Any] | None = None
    input_ids_unpadded: list[int] | None = None
    multimodal_inputs: Any = None
    validation_error: str | None = None
    data_parallel_rank: int | None = None


class BatchTokenIDOutSlim(msgspec.Struct, array_like=True, tag=True):
    """A step's rows as parallel columns, and the load tail (`kv_total_pages` 0: no report)."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: list[list[int]]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0


class ReadyResponse(msgspec.Struct, kw_only=True):
    """The registration map."""

    max_model_len: int
    num_gpu_blocks: int
    prefix_granularity: int
    dp_stats_address: str | None = None
    dtype: str
    multimodal_encoder_dtype: str | None = None
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    recipe_fingerprint: str | msgspec.UnsetType = msgspec.UNSET


_FINISH: dict[Finish, str] = {
    "": "",
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "error": "abort",
    "cache_miss": "abort",
}
_EMPTY: list[Any] = []


class TokenSpeedCodec:
    """See `Codec`."""

    registers_before_ready = False
    has_coordinator = False
    remembers_aborts = True
    duplicate_consequence = Consequence.REFUSED
    announces_shutdown = True
    default_timing: SnapshotTiming = "before_commit"
    default_semantics: LoadSemantics = "resident"
    default_trailing = False
    default_output_hwm = 1000  # libzmq's own default: the real engine sets none

    def __init__(self, config: StubConfig) -> None:
        self._config = config
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_add = msgspec.msgpack.Decoder(TokenizedGenerateReqInput).decode
        self._decode_abort = msgspec.msgpack.Decoder(list[str]).decode

    def status(self, status: str) -> bytes:
        """See `Codec.status`."""
        return self._encode(Status(status, local=True, headless=True))

    def registration(self, card: RankCard) -> bytes:
        """See `Codec.registration`. No token budget is sent as 0."""
        return self._encode(
            ReadyResponse(
                max_model_len=card.max_model_len,
                num_gpu_blocks=card.total_blocks,
                prefix_granularity=card.block_size,
                dtype=card.dtype,
                vllm_version="tokenspeed-0.1.1",
                world_size=card.group_size,
                data_parallel_size=card.group_size,
                data_parallel_rank=card.index,
                max_num_seqs=card.max_active,
                max_num_batched_tokens=card.token_budget or 0,
                instance_id=card.instance_id,
                kv_cache_size_tokens=card.capacity_tokens,
                kv_events_config=card.kv_events,
                recipe_fingerprint=card.recipe_fingerprint or msgspec.UNSET,
            )
        )

    def decode(self, frames: list[bytes]) -> Message:
        """See `Codec.decode`."""
        if len(frames) < 2:
            return _dropped(f"{len(frames)} frame(s) instead of a type and a payload")
        kind, payload = frames[0], frames[1]
        try:
            if kind == ADD:
                return self._add(self._decode_add(payload))
            if kind == ABORT:
                return Abort(self._decode_abort(payload))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if kind == ADD and is_vllm_add(payload):
                return Malformed(Problem(foreign("vllm"), Consequence.DROPPED, is_foreign=True))
            return _dropped(f"undecodable payload of type {kind.hex()}: {error}")
        return _dropped(f"unknown request type {kind.hex()}")

    def encode(self, rows: Rows, load: Load | None, index: int, form: WireForm, now: float) -> list[bytes]:
        """See `Codec.encode`; this wire carries no time."""
        del now
        sequences = rows.sequences
        values = indexes = [_EMPTY] * len(sequences)
        if any(sequence.logprobs is not None for sequence in sequences):
            values = [_values(sequence, tokens) for sequence, tokens in zip(sequences, rows.tokens, strict=True)]
            indexes = [tokens if row else _EMPTY for row, tokens in zip(values, rows.tokens, strict=True)]
        batch = BatchTokenIDOutSlim(
            [sequence.id for sequence in sequences],
            rows.tokens,
            [_FINISH[finish] for finish in rows.finishes],
            [sequence.prompt_len for sequence in sequences],
            [sequence.generated for sequence in sequences],
            [sequence.cached_tokens or 0 for sequence in sequences],
            values,
            indexes,
            index,
        )
        if load is not None:
            batch.num_running, batch.num_waiting = load.running, load.waiting
            batch.kv_active_pages, batch.kv_total_pages = load.used_blocks, load.total_blocks
        size = 12 if load is not None and load.is_short else form.tokenspeed_batch
        if size == 14:
            return [self._encode(batch)]
        return [self._encode(("BatchTokenIDOutSlim", *msgspec.structs.astuple(batch))[:size])]

    def utility_reply(self, call: Utility, index: int, now: float, result: object = None) -> list[bytes]:
        """This wire has no utility calls, so none is ever decoded."""
        raise NotImplementedError(call.method, index, now, result)

    def _add(self, message: TokenizedGenerateReqInput) -> Message:
        if not isinstance(message.rid, str):
            return _dropped("a rid must be one string")
        params = message.sampling_params
        prompt = message.input_ids or []
        room = self._config.max_model_len - len(prompt)
        request = Request(
            id=message.rid,
            prompt_ids=prompt,
            max_tokens=max(1, room if params.max_new_tokens is None else min(params.max_new_tokens, room)),
            min_tokens=params.min_new_tokens,
            eos_ids=NO_IDS if params.ignore_eos else frozenset(self._config.model.eos_token_ids),
            stop_ids=frozenset(params.stop_token_ids or ()),
            seed=params.seed,
            logprobs=0 if message.return_logprob else None,
            sampling=_sampling(params),
            uses_prefix_cache=(params.custom_params or {}).get("prefix_cache") is not False,
            row_interval=(params.stream_interval or 1) if message.stream else STREAM_OFF_INTERVAL,
        )
        reason = self._refusal(message)
        if reason is not None:
            return Add(request, Problem(reason, Consequence.REFUSED))
        oddity = _oddity(params)
        return Add(request, None if oddity is None else Problem(oddity, Consequence.SERVED))

    def _refusal(self, message: TokenizedGenerateReqInput) -> str | None:
        """Why the engine answers with an `abort` row."""
        prompt, vocab_size = message.input_ids, self._config.model.vocab_size
        if not prompt:
            return "the prompt is empty"
        if len(prompt) >= self._config.max_model_len:
            return f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._config.max_model_len}"
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            return f"a prompt id is outside the vocabulary of {vocab_size}"
        if message.return_logprob and not self._config.output_logprobs:
            return "logprobs were requested from an engine without them"
        if message.top_logprobs_num or message.token_ids_logprob or message.logprob_start_len != -1:
            return "top, per-id and prompt logprobs are not on this wire"
        return _refused_sampling(message.sampling_params, vocab_size)


def _sampling(params: SamplingParams) -> Sampling:
    """What the engine makes of the parameters: no temperature, or a negative one, is greedy."""
    is_warm = params.temperature >= _MIN_NORMALIZED_TEMPERATURE  # false for NaN
    return Sampling(
        temperature=params.temperature if is_warm else 0.0,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


def _refused_sampling(params: SamplingParams, vocab_size: int) -> str | None:
    checks = (
        (params.n == 1, f"n={params.n} is not supported on this wire"),
        (params.max_new_tokens is None or params.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
        (0 < params.top_p <= 1, f"top_p must be in (0, 1], got {params.top_p}"),
        (params.top_k == -1 or params.top_k >= 1, f"top_k must be -1 or at least 1, got {params.top_k}"),
        (0 <= params.min_p <= 1, f"min_p must be in [0, 1], got {params.min_p}"),
        (-2 <= params.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]"),
        (-2 <= params.presence_penalty <= 2, "presence_penalty must be in [-2, 2]"),
        (0 < params.repetition_penalty <= 2, "repetition_penalty must be in (0, 2]"),
        (
            0 <= params.min_new_tokens <= (params.max_new_tokens or params.min_new_tokens),
            "min_new_tokens is out of range",
        ),
        (all(0 <= token < vocab_size for token in params.stop_token_ids or ()), "a stop id is outside the vocabulary"),
    )
    return next((reason for is_fine, reason in checks if not is_fine), None)


def _oddity(params: SamplingParams) -> str | None:
    """What the engine serves without a word, but not as the sender meant it."""
    if params.stop or params.stop_strs:
        return "stop strings can't be matched without a tokenizer"
    if not params.temperature >= 0:  # NaN too
        return f"temperature {params.temperature} is served as greedy"
    if params.is_normalized and (params.temperature < _MIN_NORMALIZED_TEMPERATURE or params.top_k == -1):
        return f"marked as normalized, but not derived: temperature {params.temperature}, top_k {params.top_k}"
    return None


def _values(sequence: Sequence, tokens: list[int]) -> list[float]:
    if sequence.logprobs is None or not tokens:
        return _EMPTY
    newest = sequence.logprobs[sequence.generated - len(tokens) :]
    return [top[0][1] for top in newest]


def _dropped(reason: str) -> Malformed:
    return Malformed(Problem(reason, Consequence.DROPPED))
