"""What the engine families share on the wire: message types, limits, fault names, lenient scalars.

Bounds that hold for every decoder here: a payload is refused above `MAX_PAYLOAD_BYTES`; msgpack
extension types are never interpreted (vLLM numbers pickles 1 and 2); fields nobody reads are either
skipped or kept as flat `Raw` pieces, so hostile nesting can't multiply memory.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Raw

from gateway.types import EngineBatch, EngineDead, EngineNoise
from gateway.wire.protocol import Frame

ADD: Final = b"\x00"
ABORT: Final = b"\x01"
SENTINEL: Final = b"ENGINE_CORE_DEAD"
MAX_PAYLOAD_BYTES: Final = 64 << 20
REMEMBERED_SAMPLINGS: Final = 1024
"""Encoded sampling parameters are kept for so many different settings, a few hundred bytes each."""
MAX_REMEMBERED_STOPS: Final = 16
"""Settings with more stop ids than this are not kept: a client decides how many there are."""

MALFORMED: Final = (msgspec.DecodeError, RecursionError)
"""All that msgspec raises on foreign bytes; nesting beyond the interpreter's limit is the second."""

_ARRAYS: Final = (list, tuple)

T = TypeVar("T")

MAX_UINT32: Final = 2**32 - 1

TokenId = Annotated[int, Meta(ge=0, le=MAX_UINT32)]
Tokens = tuple[TokenId, ...]  # one allocation where a list needs two; 15 ns a row
Count = Annotated[int, Meta(ge=0, le=MAX_UINT32)]

Opaque = list[Raw] | dict[str, Raw] | str | int | float | bool | None
"""A field that is looked at, if at all, with `as_count` and friends: a bad value must not cost the message."""


class Fault(StrEnum):
    """What was wrong with a frame: the bounded set that metrics use as a label."""

    OVERSIZE = "oversize"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    RAGGED_COLUMNS = "ragged_columns"
    BAD_ROW = "bad_row"
    BAD_LOAD = "bad_load"
    BAD_ENGINE_INDEX = "bad_engine_index"


class Noise(StrEnum):
    """Why a frame can't have carried tokens."""

    EMPTY = "empty"
    NOT_AN_ARRAY = "not_an_array"
    FOREIGN = "foreign"


def encode_abort(wire_ids: Sequence[str]) -> list[bytes]:
    """Frames of an ABORT: a plain array of ids, the same in both families."""
    return [ABORT, msgspec.msgpack.encode(list(wire_ids))]


def open_message(frames: Sequence[Frame]) -> bytes | EngineBatch | EngineDead | EngineNoise:
    """Return the payload, or the message itself where no decoding is needed to know it."""
    if not frames or not len(frames[0]):
        return EngineNoise(Noise.EMPTY)
    payload = frames[0]
    if len(payload) > MAX_PAYLOAD_BYTES:
        return lossy(Fault.OVERSIZE)
    if not isinstance(payload, bytes):
        payload = bytes(payload)
    if payload == SENTINEL and len(frames) == 1:
        return EngineDead()
    return payload


def lossy(fault: Fault) -> EngineBatch:
    """A batch of the right kind in which not even the requests could be named."""
    return EngineBatch(ids=(), token_ids=(), finish=(), lossy=True, fault=fault)


def as_array(values: Sequence[int]) -> Sequence[int]:
    """Return what the encoder takes for an array: lists and tuples as they are, a copy of anything else."""
    kind = type(values)  # nearly always exactly one of the two
    return values if kind is list or kind is tuple or isinstance(values, _ARRAYS) else list(values)


def as_count(value: Opaque) -> int | None:
    """Return a non-negative 32-bit integer, or None for anything else (a bool is something else)."""
    return value if type(value) is int and 0 <= value <= MAX_UINT32 else None


def read_cell(decoder: msgspec.msgpack.Decoder[T], piece: bytes | Raw) -> T | None:
    """Decode one piece strictly; None when it isn't what the decoder expects (or is nil itself)."""
    try:
        return decoder.decode(piece)
    except MALFORMED:
        return None
