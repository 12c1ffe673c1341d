"""Decodes `BatchTokenIDOutSlim`: one typed decode for the good case, `salvage` for every other.

Rows are strict: a token is delivered only from a row of which every cell is what it should be. The
load is lenient: a bad tail costs the snapshot, never a token.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Raw

from gateway.types import EngineBatch, EngineNoise, TokenLogprob
from gateway.wire.common import MALFORMED, Count, Opaque, Tokens
from gateway.wire.tokenspeed.layout import TAG, Tail, finish_column, read_tail, row_logprobs
from gateway.wire.tokenspeed.salvage import salvage


class _Batch(msgspec.Struct, array_like=True, tag=TAG, kw_only=True):
    """The logprob columns stay raw: nearly always they hold empty rows only, seen by one comparison."""

    rids: list[str]
    output_ids: list[Tokens]
    finished_reasons: list[str]
    prompt_tokens: list[Count]
    completion_tokens: list[Count]
    cached_tokens: list[Count]
    logprob_values: Raw
    logprob_ids: Raw
    engine_index: Opaque = None
    num_running: Opaque = 0
    num_waiting: Opaque = 0
    kv_active_pages: Opaque = 0
    kv_total_pages: Opaque = 0


_MAX_REMEMBERED_ROWS: Final = 4096
_BATCH = msgspec.msgpack.Decoder(_Batch)
_LOGPROB_VALUES = msgspec.msgpack.Decoder(list[list[float]])
_LOGPROB_IDS = msgspec.msgpack.Decoder(list[Tokens])


def decode_batch(payload: bytes) -> EngineBatch | EngineNoise:
    """Decode one payload. Never raises."""
    try:
        batch = _BATCH.decode(payload)
    except MALFORMED:
        return salvage(payload)
    if _is_ragged(batch):
        return salvage(payload)
    try:
        logprobs = _logprobs_column(batch)
    except (*MALFORMED, ValueError):
        return salvage(payload)
    engine_index, load, load_fault = read_tail(
        Tail(batch.engine_index, batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages)
    )
    return EngineBatch(
        ids=batch.rids,
        token_ids=batch.output_ids,
        finish=finish_column(batch.finished_reasons),
        prompt_tokens=batch.prompt_tokens,
        completion_tokens=batch.completion_tokens,
        cached_tokens=batch.cached_tokens,
        logprobs=logprobs,
        engine_index=engine_index,
        load=load,
        load_fault=load_fault,
    )


def _is_ragged(batch: _Batch) -> bool:
    return not (
        len(batch.rids)
        == len(batch.output_ids)
        == len(batch.finished_reasons)
        == len(batch.prompt_tokens)
        == len(batch.completion_tokens)
        == len(batch.cached_tokens)
    )


def _logprobs_column(batch: _Batch) -> Sequence[Sequence[TokenLogprob] | None] | None:
    """Return None when no row has logprobs. Raises ValueError for columns or rows that don't fit."""
    rows = len(batch.rids)
    # A rank's batch has some hundred rows; what is longer must not fill the memory with what it looks like.
    empty = _empty_rows(rows) if rows <= _MAX_REMEMBERED_ROWS else _empty_rows.__wrapped__(rows)
    if bytes(batch.logprob_values) == empty and bytes(batch.logprob_ids) == empty:
        return None
    values = _LOGPROB_VALUES.decode(batch.logprob_values)
    if not len(values) == len(_LOGPROB_IDS.decode(batch.logprob_ids)) == rows:
        raise ValueError("logprob columns as long as the batch")
    column = [row_logprobs(row, len(tokens)) for row, tokens in zip(values, batch.output_ids, strict=True)]
    return column if any(column) else None


@lru_cache(maxsize=1024)
def _empty_rows(rows: int) -> bytes:
    """Return the encoding of a column of `rows` empty arrays."""
    return msgspec.msgpack.encode([[]] * rows)
