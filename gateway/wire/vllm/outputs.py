"""Decodes `EngineCoreOutputs`: one typed decode for the good case, `salvage` for every other.

Rows are strict: a token is delivered only from a row of which everything that is read is what it
should be. The load is lenient: bad statistics cost the snapshot, never a token. One message holds
rows with statistics, or a utility reply, or wave control; rows win if a rank ever mixes them.
`finished_requests` (coordinator mode only) adds nothing: those ids have a row or were aborted by us.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from gateway.native import compiled
from gateway.types import EngineBatch, EngineControl, EngineMessage, FinishReason, TokenLogprob
from gateway.wire.common import MALFORMED, MAX_PAYLOAD_BYTES, MAX_UINT32, Fault, Opaque, as_count
from gateway.wire.protocol import Frame
from gateway.wire.vllm.layout import (
    FINISH_REASONS,
    PrefillStats,
    Row,
    Shifting,
    Stats,
    SteadyRow,
    Utility,
    UtilityOutput,
    finish_column,
    read_load,
    read_time,
)
from gateway.wire.vllm.salvage import Salvaged, salvage
from gateway.wire.vllm.tensors import BadTensorError, read_logprobs

_FIRST_ROW_KEY: Final = b"num_cached_tokens"
"""Present in a payload exactly if some row is a request's first; searching for it is the cheapest test."""

R = TypeVar("R")


class _Message(msgspec.Struct, Generic[R], array_like=True):
    engine_index: Opaque = None
    outputs: list[R] = []
    scheduler_stats: Stats = None
    timestamp: Opaque = None
    utility_output: Utility = None
    finished_requests: Opaque = None
    wave_complete: Opaque = None
    start_wave: Opaque = None


_STEADY = msgspec.msgpack.Decoder(_Message[SteadyRow])
_FULL = msgspec.msgpack.Decoder(_Message[Row])
_STATS: msgspec.msgpack.Decoder[Stats] = msgspec.msgpack.Decoder(Stats)
_NO_STATS: Final = (b"", b"\xc0")


def decode_steady(payload: bytes) -> EngineBatch | None:
    """Decode a message of which all rows are steady, and there are some; None for any other. Never raises."""
    if _FIRST_ROW_KEY in payload or len(payload) > MAX_PAYLOAD_BYTES:
        return None
    try:
        message = _STEADY.decode(payload)
    except MALFORMED:
        return None  # logprobs, or damage
    rows, engine_index = message.outputs, message.engine_index
    if not rows or type(engine_index) is not int:
        return None
    stats, taken_at_s = message.scheduler_stats, message.timestamp
    if stats is None:
        load, load_fault = None, None
    else:
        load, load_fault = read_load(stats, read_time(taken_at_s))
    if len(rows) == 1:
        row = rows[0]
        ids, token_ids = [row.request_id], [row.token_ids]
        finish: list[FinishReason] = [""] if row.finish_reason is None else finish_column([row.finish_reason])
    else:
        ids = [row.request_id for row in rows]
        token_ids = [row.token_ids for row in rows]
        finish = finish_column([row.finish_reason for row in rows])
    return EngineBatch(
        ids=ids,
        token_ids=token_ids,
        finish=finish,
        engine_index=engine_index if 0 <= engine_index <= MAX_UINT32 else None,
        load=load,
        load_fault=load_fault,
    )


def decode_compiled(payload: bytes) -> EngineBatch | None:
    """Decode a message of which all rows are ordinary, first ones too; None for any other. Never raises."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        return None
    assert compiled is not None
    found = compiled.decode_vllm(payload, FINISH_REASONS)
    if found is None:
        return None
    engine_index, ids, token_ids, finish, cached_tokens, stats, taken_at_s = found
    load, load_fault = None, None
    if stats not in _NO_STATS:
        try:
            load, load_fault = read_load(_STATS.decode(stats), read_time(taken_at_s))
        except MALFORMED:
            return None
    return EngineBatch(
        ids=ids,
        token_ids=token_ids,
        finish=finish,
        cached_tokens=cached_tokens,
        engine_index=engine_index,
        load=load,
        load_fault=load_fault,
    )


decode_plain = decode_steady if compiled is None else decode_compiled
"""The cheapest way for most messages; what it returns None for is for `decode_outputs`."""


def decode_outputs(payload: bytes, frames: Sequence[Frame]) -> EngineMessage:
    """Decode one message; `frames` is all of it, for tensors that point at aux frames. Never raises."""
    try:
        message = _FULL.decode(payload)
    except MALFORMED:
        return _salvage(payload, frames)
    if type(message.engine_index) is not int:
        return _salvage(payload, frames)
    if not message.outputs and (control := _control(message)) is not None:
        return control
    whole = Salvaged(message.engine_index, message.outputs, [], False, message.scheduler_stats, None)
    return _batch(whole, frames, read_time(message.timestamp))


def _control(message: _Message[R]) -> EngineControl | None:
    """Return the utility reply or the wave control of a message without rows, if it is one."""
    utility = message.utility_output if type(message.utility_output) is UtilityOutput else None
    wave_complete, start_wave = as_count(message.wave_complete), as_count(message.start_wave)
    if utility is None and wave_complete is None and start_wave is None:
        return None
    call_id, failure = (utility.call_id, utility.failure) if utility is not None else (None, None)
    return EngineControl(
        engine_index=as_count(message.engine_index),
        wave_complete=wave_complete,
        start_wave=start_wave,
        utility_call_id=call_id if type(call_id) is int else None,
        utility_failure=failure if isinstance(failure, str) else None,
    )


def _salvage(payload: bytes, frames: Sequence[Frame]) -> EngineMessage:
    found = salvage(payload)
    return _batch(found, frames) if isinstance(found, Salvaged) else found


def _batch(found: Salvaged, frames: Sequence[Frame], taken_at_s: float | None = None) -> EngineBatch:
    """Build the columns. An id with an unreadable row loses all its rows: no later token without an earlier one."""
    rows = found.rows
    logprobs, unreadable = _logprobs(rows, frames)
    failed = dict.fromkeys((*found.failed_ids, *unreadable))
    if failed:
        kept = [at for at, row in enumerate(rows) if row.request_id not in failed]
        rows = [rows[at] for at in kept]
        logprobs = [logprobs[at] for at in kept] if logprobs is not None else None
    load, load_fault = read_load(found.stats, taken_at_s)
    return EngineBatch(
        ids=[row.request_id for row in rows],
        token_ids=[row.token_ids for row in rows],
        finish=finish_column([row.finish_reason for row in rows]),
        cached_tokens=_cached_tokens(rows),
        logprobs=logprobs,
        engine_index=as_count(found.engine_index),
        load=load,
        load_fault=load_fault,
        failed_ids=list(failed),
        lossy=found.is_lossy,
        fault=found.fault or (Fault.BAD_ROW if failed else None),
    )


def _logprobs(rows: list[Row], frames: Sequence[Frame]) -> tuple[list[list[TokenLogprob] | None] | None, list[str]]:
    """Return (column, None when no row has any; ids of rows whose logprobs can't be read)."""
    pieces = [row.logprobs for row in rows]
    if pieces.count(None) == len(pieces):
        return None, []
    column: list[list[TokenLogprob] | None] = [None] * len(rows)
    unreadable: list[str] = []
    for at, row in enumerate(rows):
        if row.logprobs is not None:
            try:
                column[at] = read_logprobs(row.logprobs, len(row.token_ids), frames)
            except BadTensorError:
                unreadable.append(row.request_id)
    return column, unreadable


_SHIFTING_COLUMNS: Final[tuple[Callable[[list[Row]], list[Shifting]], ...]] = (
    lambda rows: [row.shifting_11 for row in rows],
    lambda rows: [row.shifting_10 for row in rows],
    lambda rows: [row.shifting_12 for row in rows],
    lambda rows: [row.shifting_13 for row in rows],
    lambda rows: [row.shifting_14 for row in rows],
    lambda rows: [row.shifting_9 for row in rows],
)
"""Where a release may keep `prefill_stats`, today's position first: a plain pass costs 20 ns a row."""


def _cached_tokens(rows: list[Row]) -> list[int | None] | None:
    """Return prefix-cache hits per row (first rows only have them); None if no row has any."""
    for shifting in _SHIFTING_COLUMNS:
        cells = shifting(rows)
        if cells.count(None) == len(cells):
            continue
        column = [None if cell is None else _cached(cell) for cell in cells]
        if column.count(None) != len(column):
            return column
    return None


def _cached(cell: Shifting) -> int | None:
    return as_count(cell.num_cached_tokens) if type(cell) is PrefillStats else None
