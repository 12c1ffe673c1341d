"""vLLM's tensors on the wire, and the log probabilities made of them.

A tensor is `[dtype, shape, data]`: dtype a numpy code (`<f4`) or a torch name (`float32`); data an
inline extension of type 3 (raw bytes, below 256 bytes) or the index of a frame of the message, the
payload being frame 0. Logprobs of a row are `[token ids, logprobs, ranks, ...]`: ids and logprobs of
shape [new tokens, 1 + top], the sampled token in column 0; ranks are not used here.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from gateway.types import TokenLogprob
from gateway.wire.common import MAX_UINT32, Count
from gateway.wire.protocol import Frame

_RAW_VIEW_EXTENSION: Final = 3


def _formats(names: Sequence[str], codes: str) -> dict[str, str]:
    """Return the struct format (order + code) of every spelling of these dtypes."""
    orders = (("", "<"), ("<", "<"), ("|", "<"), ("=", "<"), (">", ">"))
    return {f"{mark}{name}": order + code for name, code in zip(names, codes, strict=True) for mark, order in orders}


_INTEGERS: Final = _formats(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"), "bhiqBHIQ") | _formats(
    ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), "bhiqBHIQ"
)
_FLOATS: Final = _formats(("f2", "f4", "f8", "float16", "float32", "float64"), "efdefd")


class Matrix(msgspec.Struct, array_like=True, gc=False):
    """A two-dimensional tensor as it travels."""

    dtype: str
    shape: tuple[Count, Count]
    data: Count | msgspec.msgpack.Ext


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """A row's logprobs as they travel; the elements after these two are skipped."""

    token_ids: Matrix
    values: Matrix


class BadTensorError(ValueError):
    """A tensor that contradicts itself, points outside its message or is of a kind not read here."""


def read_logprobs(logprobs: Logprobs, token_count: int, frames: Sequence[Frame]) -> list[TokenLogprob]:
    """Return one `TokenLogprob` per new token. Raises `BadTensorError`.

    Alternatives may outnumber those the request asked for: a rank pads to the maximum in its batch.
    """
    rows, width = shape = logprobs.token_ids.shape
    if shape != logprobs.values.shape or rows < token_count or not width:
        raise BadTensorError(f"logprob shapes {shape} and {logprobs.values.shape} for {token_count} tokens")
    values = _read(logprobs.values, frames, _FLOATS)
    if width == 1:  # the sampled tokens only: their ids are the row's tokens
        return [TokenLogprob(value) for value in values[:token_count]]
    ids = _read(logprobs.token_ids, frames, _INTEGERS)
    if min(ids, default=0) < 0 or max(ids, default=0) > MAX_UINT32:
        raise BadTensorError("token ids are 0..2^32-1")
    return [
        TokenLogprob(values[at], tuple(zip(ids[at + 1 : at + width], values[at + 1 : at + width], strict=True)))
        for at in range(0, token_count * width, width)
    ]


def _read(matrix: Matrix, frames: Sequence[Frame], formats: dict[str, str]) -> tuple[Any, ...]:
    """Return the values in row-major order."""
    form = formats.get(matrix.dtype)
    if form is None:
        raise BadTensorError(f"tensor of dtype {matrix.dtype[:16]!r}")
    buffer = _buffer(matrix.data, frames)
    rows, width = matrix.shape
    layout = _layout(form, rows * width) if rows * width <= len(buffer) else None
    if layout is None or layout.size != len(buffer):
        raise BadTensorError(f"tensor of shape {matrix.shape} in {len(buffer)} bytes")
    return layout.unpack(buffer)


@lru_cache(maxsize=1024)
def _layout(form: str, count: int) -> struct.Struct:
    return struct.Struct(f"{form[0]}{count}{form[1]}")


def _buffer(data: int | msgspec.msgpack.Ext, frames: Sequence[Frame]) -> Frame:
    if isinstance(data, int):
        if not 0 < data < len(frames):
            raise BadTensorError(f"aux frame {data} of a message of {len(frames)}")
        return frames[data]
    if data.code != _RAW_VIEW_EXTENSION:
        raise BadTensorError(f"extension type {data.code} is never decoded")
    return memoryview(data.data)
