"""Weights as float32 arrays by name, from an integer hash or from files, and their digest.

A tensor is asked for once, in any order; `digest` afterwards covers all of them.
"""

import hashlib
import math
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_stub.config import Model
from engine_stub.model import ModelError
from engine_stub.model import shape as shapes
from engine_stub.model.fixed import GRID, GRID_BITS
from engine_stub.model.safetensors import Checkpoint
from engine_stub.model.shape import Shape

Values = NDArray[np.float32]

LOGIT_GAIN = 4
"""The hashed output matrix is this many times larger than an ordinary one: logits with clear winners."""
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 22
"""Elements hashed at a time: bounds the scratch memory of a large tensor."""


class Tensors(Protocol):
    """Where a model gets its weights."""

    def tensor(self, name: str, dimensions: tuple[int, ...]) -> Values:
        """The real values of one tensor as float32; raises `ModelError` when it is missing or of another shape."""
        ...


class HashedTensors:
    """Weights without a file: element i of a tensor is SplitMix64 of (seed, name, i), uniform, mean 0.

    Matrices have variance 1/inputs, so that activations stay near 1; norms are 1. All of it is integer
    arithmetic on the grid of 2^-12, hence the same on any machine. SplitMix64 is the public generator
    of Steele, Lea and Flood (2014).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def tensor(self, name: str, dimensions: tuple[int, ...]) -> Values:
        """See `Tensors.tensor`."""
        if len(dimensions) == 1:
            return np.ones(dimensions, dtype=np.float32)
        is_embedding = name == "model.embed_tokens.weight"
        variance_inverse = 1 if is_embedding else dimensions[1]
        bound = math.isqrt((3 << 2 * GRID_BITS) // variance_inverse)
        if name == "lm_head.weight":
            bound *= LOGIT_GAIN
        key = int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8], "little")
        result = np.empty(dimensions, dtype=np.float32)
        flat = result.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            end = min(start + _CHUNK, flat.size)
            flat[start:end] = uniform_units(key, start, end, bound)
        result *= np.float32(GRID)
        return result


class FileTensors:
    """Pretrained weights in a directory of safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._checkpoint = Checkpoint(directory)

    def tensor(self, name: str, dimensions: tuple[int, ...]) -> Values:
        """See `Tensors.tensor`."""
        values = self._checkpoint.read(name)
        if values.shape != dimensions:
            raise ModelError(f"{name}: the file has {list(values.shape)}, config.json means {list(dimensions)}")
        return values


class Recorded:
    """Another source that remembers a digest of every tensor that went through."""

    def __init__(self, source: Tensors) -> None:
        self._source = source
        self._digests: dict[str, bytes] = {}

    def tensor(self, name: str, dimensions: tuple[int, ...]) -> Values:
        """See `Tensors.tensor`."""
        values = self._source.tensor(name, dimensions)
        self._digests[name] = hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).digest()
        return values

    def digest(self) -> str:
        """SHA-256 (hex) over names and contents of all tensors seen, in the order of their names."""
        total = hashlib.sha256()
        for name in sorted(self._digests):
            total.update(name.encode() + b"\0" + self._digests[name])
        return total.hexdigest()


def of_model(model: Model) -> tuple[Shape, Tensors]:
    """Shape and weights of the configured model; raises `ModelError`."""
    shape = shapes.of_model(model)
    if model.path is not None:
        return shape, FileTensors(Path(model.path))
    return shape, HashedTensors(model.architecture.weight_seed if model.architecture is not None else 0)


def uniform_units(key: int, start: int, end: int, bound: int) -> NDArray[np.int64]:
    """Integers in -bound .. bound for elements start .. end - 1."""
    state = np.arange(start + 1, end + 1, dtype=np.uint64)
    state *= np.uint64(_GOLDEN)
    state += np.uint64(key)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    # The upper half times the range, upper half again: an integer below the range, without a division.
    state >>= np.uint64(32)
    state *= np.uint64(2 * bound + 1)
    state >>= np.uint64(32)
    return state.astype(np.int64) - bound
