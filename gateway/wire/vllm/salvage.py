"""Gets out of a damaged `EngineCoreOutputs` what is certain, and names the rest.

Rows are self-contained here, so each stands or falls alone: a whole row whose id, tokens, logprobs
and finish can be read is kept, an unreadable one fails the id it names, and one without a readable
id makes the batch lossy. The array has no tag; it is ours if it begins with an integer.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway.types import EngineBatch, EngineNoise
from gateway.wire.common import MALFORMED, Fault, Noise, Tokens, lossy, read_cell
from gateway.wire.scan import Pieces, split_array
from gateway.wire.vllm.layout import Row, Stats
from gateway.wire.vllm.tensors import Logprobs


class Salvaged(NamedTuple):
    """What could be read. `failed_ids` had an unreadable row; `is_lossy`: some row could not be named."""

    engine_index: int
    rows: list[Row]
    failed_ids: list[str]
    is_lossy: bool
    stats: Stats
    fault: Fault | None


class _Core(msgspec.Struct, array_like=True):
    """The part of a row that must be right; what else it holds may be of any kind."""

    request_id: str
    token_ids: Tokens
    logprobs: Logprobs | None = None
    prompt_logprobs: Raw = Raw(b"\xc0")
    pooling_output: Raw = Raw(b"\xc0")
    finish_reason: Raw = Raw(b"\xc0")


_NIL: Final = b"\xc0"
_INTEGER_LEADS: Final = range(0xCC, 0xD4)
_UNKNOWN_REASON: Final = -1

_INTEGER = msgspec.msgpack.Decoder(int)
_STRING = msgspec.msgpack.Decoder(str)
_ROW = msgspec.msgpack.Decoder(Row)
_CORE = msgspec.msgpack.Decoder(_Core)
_STATS: msgspec.msgpack.Decoder[Stats] = msgspec.msgpack.Decoder(Stats)


def salvage(payload: bytes) -> Salvaged | EngineBatch | EngineNoise:
    """Read what the typed decoders refused. Never raises; slow, and bounded by the scan's limits."""
    top = split_array(payload)
    if top is None:
        return EngineNoise(Noise.NOT_AN_ARRAY)
    if not top.items:
        cut_in_index = top.declared > 0 and (not top.rest or top.rest[0] in _INTEGER_LEADS)
        return lossy(Fault.TRUNCATED) if cut_in_index else EngineNoise(Noise.FOREIGN)
    engine_index = read_cell(_INTEGER, top.items[0])
    if engine_index is None:
        return EngineNoise(Noise.FOREIGN)
    outputs = split_array(top.items[1] if len(top.items) > 1 else top.rest)
    if outputs is None:
        return lossy(Fault.BAD_ROW if top.is_complete else Fault.TRUNCATED)
    rows, failed_ids, unnamed = _sort_rows(outputs)
    return Salvaged(
        engine_index=engine_index,
        rows=rows,
        failed_ids=failed_ids,
        is_lossy=unnamed > 0,
        stats=_stats(top.items[2]) if len(top.items) > 2 else None,
        fault=_fault(top, has_bad_rows=bool(failed_ids) or unnamed > 0),
    )


def _sort_rows(outputs: Pieces) -> tuple[list[Row], list[str], int]:
    """Return (readable rows, ids of unreadable ones, number of rows without a readable id)."""
    rows: list[Row] = []
    failed: dict[str, None] = {}
    pieces: Sequence[bytes] = outputs.items if outputs.is_complete else [*outputs.items, outputs.rest]
    unnamed = outputs.declared - len(pieces)
    for piece in pieces:
        row = _row(piece)
        name = None if row is not None else _name(piece)
        if row is not None:
            rows.append(row)
        elif name is not None:
            failed[name] = None
        else:
            unnamed += 1
    return rows, list(failed), unnamed


def _row(piece: bytes) -> Row | None:
    row = read_cell(_ROW, piece)
    if row is not None:
        return row
    core = read_cell(_CORE, piece)
    if core is None:
        return None
    return Row(core.request_id, core.token_ids, core.logprobs, finish_reason=_reason(core.finish_reason))


def _reason(raw: Raw) -> int | None:
    if bytes(raw) == _NIL:
        return None
    reason = read_cell(_INTEGER, raw)
    return _UNKNOWN_REASON if reason is None else reason


def _name(piece: bytes) -> str | None:
    """Return the request id of an unreadable or cut-off row."""
    cells = split_array(piece)
    return read_cell(_STRING, cells.items[0]) if cells is not None and cells.items else None


def _stats(piece: bytes) -> Stats:
    """Return the statistics; those that can't be decoded become a string, which they may not be."""
    try:
        return _STATS.decode(piece)
    except MALFORMED:
        return ""


def _fault(top: Pieces, *, has_bad_rows: bool) -> Fault | None:
    if not top.is_complete:
        return Fault.TRUNCATED
    if has_bad_rows:
        return Fault.BAD_ROW
    return Fault.TRAILING_BYTES if top.rest else None
