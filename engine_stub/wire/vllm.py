"""vLLM 0.32's engine-core wire, engine side: positional arrays, with maps for sampling and statistics.

A real engine core validates inside the decoder of its input thread, and what fails there or in the
scheduler costs more than the request: see `vllm_request` for the table. Rows carry no counts.
"""

from typing import Any

import msgspec

from engine_stub.config import LoadSemantics, SnapshotTiming, StubConfig
from engine_stub.faults import WireForm
from engine_stub.scheduler.plan import Rows, TopLogprobs
from engine_stub.scheduler.sequence import Finish, Sequence
from engine_stub.wire.codec import (
    ABORT,
    ADD,
    START_DP_WAVE,
    UTILITY,
    Abort,
    Consequence,
    Load,
    Malformed,
    Message,
    Problem,
    RankCard,
    Utility,
    Wave,
)
from engine_stub.wire.foreign import foreign, is_tokenspeed_add
from engine_stub.wire.handshake import BareStatus
from engine_stub.wire.tensors import Frames, pack_floats, pack_ints
from engine_stub.wire.vllm_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    SchedulerStats,
)
from engine_stub.wire.vllm_request import EngineCoreRequest, to_add

_FINISH: dict[Finish, int | None] = {"": None, "stop": 0, "length": 1, "abort": 2, "error": 3, "cache_miss": 2}
_UTILITIES: dict[str, object] = {
    "get_supported_tasks": ["generate"],
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "reset_prefix_cache": True,
    "get_weight_version": "default",
}


class VllmCodec:
    """See `Codec`."""

    registers_before_ready = True
    has_coordinator = True
    remembers_aborts = False
    duplicate_consequence = Consequence.DEAD
    announces_shutdown = False
    default_timing: SnapshotTiming = "after_commit"
    default_semantics: LoadSemantics = "disjoint"
    default_trailing = True
    default_output_hwm = 0

    def __init__(self, config: StubConfig) -> None:
        self._config = config
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_add = msgspec.msgpack.Decoder(EngineCoreRequest).decode
        self._decode_abort = msgspec.msgpack.Decoder(list[str]).decode
        self._decode_wave = msgspec.msgpack.Decoder(tuple[int, int | None]).decode
        self._decode_utility = msgspec.msgpack.Decoder(tuple[int, int, str, list[Any]]).decode

    def status(self, status: str) -> bytes:
        """See `Codec.status`."""
        return self._encode(BareStatus(status, local=False, headless=True))

    def registration(self, card: RankCard) -> bytes:
        """See `Codec.registration`."""
        return self._encode(
            EngineCoreReadyResponse(
                max_model_len=card.max_model_len,
                num_gpu_blocks=card.total_blocks,
                block_size=card.block_size,
                dtype=card.dtype,
                data_parallel_size=card.group_size if self._config.lockstep else 1,
                data_parallel_rank=card.index,
                max_num_seqs=card.max_active,
                max_num_batched_tokens=card.token_budget or card.max_model_len,
                instance_id=card.instance_id,
                kv_cache_size_tokens=card.capacity_tokens,
                kv_cache_max_concurrency=card.capacity_tokens / card.max_model_len,
                kv_events_config=card.kv_events,
                effective_attention_block_size=card.block_size,
                recipe_fingerprint=card.recipe_fingerprint or msgspec.UNSET,
            )
        )

    def decode(self, frames: list[bytes]) -> Message:
        """See `Codec.decode`."""
        if len(frames) < 2:
            return _deafening(f"{len(frames)} frame(s) instead of a type and a payload")
        kind, payload = frames[0], frames[1]
        try:
            if kind == ADD:
                return to_add(self._decode_add(payload), self._config)
            if kind == ABORT:
                return Abort(self._decode_abort(payload))
            if kind == START_DP_WAVE:
                return Wave(*self._decode_wave(payload))
            if kind == UTILITY:
                _client, call_id, method, args = self._decode_utility(payload)
                return Utility(call_id, method, args)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if kind == ADD and is_tokenspeed_add(payload):
                return Malformed(Problem(foreign("tokenspeed"), Consequence.DEAF, is_foreign=True))
            return _deafening(f"undecodable payload of type {kind.hex()}: {error}")
        return _deafening(f"unknown request type {kind.hex()}")

    def encode(self, rows: Rows, load: Load | None, index: int, form: WireForm, now: float) -> list[bytes]:
        """See `Codec.encode`."""
        frames = Frames()
        outputs = [
            EngineCoreOutput(sequence.id, tokens)
            if not finish and sequence.generated != 1 and sequence.logprobs is None
            else _full_row(sequence, tokens, finish, now, frames)
            for sequence, tokens, finish in zip(rows.sequences, rows.tokens, rows.finishes, strict=True)
        ]
        stats = None if load is None else _stats(load, rows)
        batch = EngineCoreOutputs(index, outputs, stats, now)
        if form.vllm_row == 14:
            batch.outputs = [_astuple14(row) for row in outputs]
        return [self._batch(batch, form.vllm_batch), *frames.aux]

    def report(
        self,
        index: int,
        load: Load | None,
        wave: int,
        step: int,
        complete: int | None,
        start: int | None,
        now: float,
    ) -> bytes:
        """A push to the coordinator: a load, or that a wave is over or has begun."""
        stats = None
        if load is not None:
            stats = _stats(load, Rows())
            if isinstance(stats, SchedulerStats):
                stats.step_counter, stats.current_wave = step, wave
        return self._encode(
            EngineCoreOutputs(index, [], stats, now, wave_complete=complete, start_wave=start, weight_version=None)
        )

    def utility_reply(self, call: Utility, index: int, now: float, result: object = None) -> list[bytes]:
        """See `Codec.utility_reply`: `[call id, failure or nil, [type hint, value] or nil]`."""
        reply: list[object]
        if call.method in _UTILITIES:
            value = _UTILITIES[call.method] if result is None else result
            reply = [call.call_id, None, [None, value]]
        else:
            failure = f"Call to {call.method} method failed: the stub's engine core has no such method"
            reply = [call.call_id, failure, None]
        return [self._encode(EngineCoreOutputs(index, [], None, now, utility_output=reply, weight_version=None))]

    def _batch(self, batch: EngineCoreOutputs, size: int) -> bytes:
        return self._encode(batch if size == 9 else msgspec.structs.astuple(batch)[:size])


def _full_row(sequence: Sequence, tokens: list[int], finish: Finish, now: float, frames: Frames) -> EngineCoreOutput:
    """A row with more than tokens: the first one, one with logprobs, or the last one."""
    row = EngineCoreOutput(sequence.id, tokens, finish_reason=_FINISH[finish])
    if sequence.generated == 1:
        row.events = [{"type": 1, "timestamp": now}, {"type": 2, "timestamp": now}]  # queued, scheduled
        cached = sequence.cached_tokens or 0
        row.prefill_stats = {
            "num_prompt_tokens": sequence.prompt_len,
            "num_computed_tokens": sequence.prompt_len - cached,
            "num_cached_tokens": cached,
            "num_local_cached_tokens": cached,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": 0,
        }
    if finish == "stop" and sequence.stop_token not in sequence.request.eos_ids:
        row.stop_reason = sequence.stop_token  # nil when the EOS id ended it
    elif finish and sequence.reason is not None:
        row.stop_reason = sequence.reason  # a real engine core says nothing here; a string is legal
    if sequence.logprobs is not None and tokens:
        row.new_logprobs = _logprobs(sequence.logprobs[sequence.generated - len(tokens) :], frames)
    return row


def _logprobs(positions: list[TopLogprobs], frames: Frames) -> list[Any]:
    """Arrays [positions, 1 + k] of ids and logprobs, chosen token first and again among the top k, and its rank."""
    ids = [[top[0][0], *(token for token, _ in top)] for top in positions]
    values = [[top[0][1], *(value for _, value in top)] for top in positions]
    shape = [len(positions), len(ids[0])]
    return [
        frames.tensor("<i4", shape, pack_ints([token for row in ids for token in row], 4)),
        frames.tensor("<f4", shape, pack_floats([value for row in values for value in row])),
        frames.tensor("<i8", shape[:1], pack_ints([1] * len(positions), 8)),
        None,
    ]


def _stats(load: Load, rows: Rows) -> Any:
    started = [sequence for sequence in rows.sequences if sequence.generated == 1]
    is_number = isinstance(load.used_blocks, int) and load.total_blocks
    stats = SchedulerStats(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        kv_cache_usage=load.used_blocks / load.total_blocks if is_number else load.used_blocks,
        prefix_cache_stats={
            "reset": False,
            "requests": len(started),
            "queries": sum(sequence.prompt_len for sequence in started),
            "hits": sum(sequence.cached_tokens or 0 for sequence in started),
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            "hits_by_source": {},
        },
    )
    return {"num_running_reqs": load.running} if load.is_short else stats


def _astuple14(row: EngineCoreOutput) -> tuple[Any, ...]:
    return tuple(msgspec.structs.astuple(row)[:14])


def _deafening(reason: str) -> Malformed:
    return Malformed(Problem(reason, Consequence.DEAF))
