"""Gets out of a damaged `BatchTokenIDOutSlim` what is certain, and names the rest.

A row is delivered when its id, tokens, finish and every other cell it has can be read and its
columns are as long as the id column. An id whose row can't be read goes to `failed_ids`, with all
its rows in this message: handing out a later row without an earlier one would leave a gap. Rows
whose id is unreadable make the batch `lossy`.

Only the columns that locate tokens (`output_ids`, `finished_reasons`) are indispensable. A count or
logprob column of the wrong length can't be aligned with rows and is dropped as a whole.
"""

from typing import Any, Final

import msgspec

from gateway.types import EngineBatch, EngineNoise, TokenLogprob
from gateway.wire.common import MALFORMED, Count, Fault, Noise, Opaque, Tokens, lossy, read_cell
from gateway.wire.scan import Pieces, split_array
from gateway.wire.tokenspeed.layout import FIRST_TAIL_POSITION, TAG, Tail, finish_column, read_tail, row_logprobs

_STRING = msgspec.msgpack.Decoder(str)
_TOKENS = msgspec.msgpack.Decoder(Tokens)
_COUNT = msgspec.msgpack.Decoder(Count)
_FLOATS = msgspec.msgpack.Decoder(list[float])
_OPAQUE: msgspec.msgpack.Decoder[Opaque] = msgspec.msgpack.Decoder(Opaque)

_ENCODED_TAG: Final = msgspec.msgpack.encode(TAG)
_RIDS: Final = 1
_REQUIRED: Final[tuple[tuple[int, msgspec.msgpack.Decoder[Any]], ...]] = ((2, _TOKENS), (3, _STRING))
_OPTIONAL: Final[tuple[tuple[int, msgspec.msgpack.Decoder[Any]], ...]] = (
    (4, _COUNT),
    (5, _COUNT),
    (6, _COUNT),
    (7, _FLOATS),
    (8, _TOKENS),
)


def salvage(payload: bytes) -> EngineBatch | EngineNoise:
    """Decode what the typed decoder refused. Never raises; slow, and bounded by the scan's limits."""
    top = split_array(payload)
    if top is None:
        return EngineNoise(Noise.NOT_AN_ARRAY)
    if not top.items:
        cut_in_tag = top.declared > 0 and _ENCODED_TAG.startswith(top.rest)
        return lossy(Fault.TRUNCATED) if cut_in_tag else EngineNoise(Noise.FOREIGN)
    if read_cell(_STRING, top.items[0]) != TAG:
        return EngineNoise(Noise.FOREIGN)
    names = _column(top, _RIDS)
    if names is None:
        return lossy(Fault.RAGGED_COLUMNS if top.is_complete else Fault.TRUNCATED)
    return _Salvage(top, names).batch()


def _column(top: Pieces, position: int) -> Pieces | None:
    """Return a column's cells; of a column that was cut off, the whole cells before the cut."""
    if position < len(top.items):
        return split_array(top.items[position])
    if position == len(top.items) < top.declared:
        return split_array(top.rest)
    return None


class _Salvage:
    """The pieces of one message while they are sorted into rows and failures."""

    def __init__(self, top: Pieces, names: Pieces) -> None:
        self.top = top
        self.is_every_row_named = names.is_complete
        self.row_count = names.declared
        self.ids = [read_cell(_STRING, cell) for cell in names.items]
        self.required = [self._read(position, decoder) for position, decoder in _REQUIRED]
        self.optional = [self._read(position, decoder) for position, decoder in _OPTIONAL]

    def batch(self) -> EngineBatch:
        logprobs, mismatched = self._logprobs()
        tokens, finish = self.required
        is_aligned = tokens is not None and finish is not None
        columns = [column for column in (*self.required, *self.optional) if column is not None]
        bad = {
            row
            for row in range(len(self.ids))
            if not is_aligned or row in mismatched or any(column[row] is None for column in columns)
        }
        failed = dict.fromkeys(name for row, name in enumerate(self.ids) if row in bad and name is not None)
        rows = [row for row, name in enumerate(self.ids) if row not in bad and name is not None and name not in failed]
        engine_index, load, load_fault = read_tail(self._tail())
        prompt, completion, cached = (_take(column, rows) for column in self.optional[:3])
        return EngineBatch(
            ids=[self.ids[row] or "" for row in rows],
            token_ids=_take(tokens, rows) or [],
            finish=finish_column(_take(finish, rows) or []),
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            logprobs=_take(logprobs, rows),
            engine_index=engine_index,
            load=load,
            load_fault=load_fault,
            failed_ids=list(failed),
            lossy=not self.is_every_row_named or None in self.ids,
            fault=self._fault(has_bad_rows=bool(bad) or None in self.ids),
        )

    def _read(self, position: int, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any] | None:
        """Return the cells of one column, None for each unreadable one; None for an unaligned column."""
        pieces = _column(self.top, position)
        if pieces is None or not pieces.is_complete or pieces.declared != self.row_count:
            return None
        return [read_cell(decoder, cell) for cell in pieces.items]

    def _logprobs(self) -> tuple[list[list[TokenLogprob] | None] | None, set[int]]:
        """Return the logprob column, if it is worth having one, and the rows whose logprobs don't fit."""
        tokens, values = self.required[0], self.optional[3]
        if tokens is None or values is None or self.optional[4] is None:
            return None, set()
        column: list[list[TokenLogprob] | None] = [None] * self.row_count
        mismatched = set()
        for row, (row_tokens, row_values) in enumerate(zip(tokens, values, strict=True)):
            try:
                column[row] = row_logprobs(row_values or [], len(row_tokens or []))
            except ValueError:
                mismatched.add(row)
        return (column if any(column) else None), mismatched

    def _tail(self) -> Tail:
        """Return the fields after the columns; one that can't be decoded becomes a string, which none may be."""
        pieces = self.top.items[FIRST_TAIL_POSITION : FIRST_TAIL_POSITION + len(Tail._fields)]
        return Tail(*(_opaque(piece) for piece in pieces))

    def _fault(self, *, has_bad_rows: bool) -> Fault | None:
        if not self.top.is_complete:
            return Fault.TRUNCATED
        if None in self.required or None in self.optional:
            return Fault.RAGGED_COLUMNS
        if has_bad_rows:
            return Fault.BAD_ROW
        return Fault.TRAILING_BYTES if self.top.rest else None


def _opaque(piece: bytes) -> Opaque:
    try:
        return _OPAQUE.decode(piece)
    except MALFORMED:
        return ""


def _take(column: list[Any] | None, rows: list[int]) -> list[Any] | None:
    return None if column is None else [column[row] for row in rows]
