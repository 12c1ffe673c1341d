"""Reader of safetensors files: what this project needs of the public format, without its package.

Format: 8 bytes with the header's length (little-endian), a JSON header `{name: {dtype, shape,
data_offsets: [begin, end]}}`, then the raw tensors, little-endian, rows first. A checkpoint of several
files has `model.safetensors.index.json` with `weight_map: {tensor: file}`.
"""

import math
import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_stub.model import ModelError

HEADER_LIMIT = 100_000_000
"""Longest header that is believed, in bytes; the format's own limit."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class File:
    """One file, mapped into memory. Raises `ModelError` when it isn't what it says to be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file can't be mapped
            raise ModelError(f"{path}: {error}") from error
        length = int.from_bytes(self._map[:8], "little")
        self._data = 8 + length
        if length > HEADER_LIMIT or self._data > len(self._map):
            raise ModelError(f"{path}: not a safetensors file, or cut short: its header would be {length} bytes")
        try:
            header = msgspec.json.decode(self._map[8 : self._data], type=dict[str, Any])
            header.pop("__metadata__", None)
            self.entries = msgspec.convert(header, dict[str, _Entry])
        except msgspec.DecodeError as error:
            raise ModelError(f"{path}: {error}") from error

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, exactly."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{self.path}: {name} is {entry.dtype}; supported: {', '.join(_DTYPES)}")
        begin, end = entry.data_offsets
        count = math.prod(entry.shape)
        if not 0 <= begin <= end or end - begin != count * int(dtype[2:]):
            raise ModelError(f"{self.path}: {name} has {end - begin} bytes for shape {list(entry.shape)}")
        if self._data + end > len(self._map):
            raise ModelError(f"{self.path}: {name} ends behind the file: it was cut short")
        raw = np.frombuffer(self._map, dtype=dtype, count=count, offset=self._data + begin).reshape(entry.shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.astype(np.float32)


class Checkpoint:
    """All tensors of a directory; a shard that is missing is refused at once, not at the first read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / INDEX
        names = sorted(set(self._weight_map(index).values())) if index.exists() else [SINGLE]
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(f"{directory}: partial weights, without {', '.join(missing)}: all shards are needed")
        self._files: dict[str, File] = {}
        for name in names:
            file = File(directory / name)
            self._files |= dict.fromkeys(file.entries, file)
        if index.exists():
            lost = self._weight_map(index).keys() - self._files.keys()
            if lost:
                raise ModelError(f"{directory}: partial weights: no shard has {', '.join(sorted(lost)[:3])}")

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32; raises `ModelError` for an unknown name."""
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._directory}: no tensor {name}: the weights don't fit config.json")
        return file.read(name)

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        try:
            return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise ModelError(f"{index}: {error}") from error
