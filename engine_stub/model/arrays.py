"""The few array operations that the exact model needs, so that one source runs on numpy and on torch.

Operators (+, -, *, /), `reshape` and `swapaxes` are the arrays' own; both libraries agree on them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_stub.model.fixed import LIMIT, Floats

Array = Any
"""A float64 (or index) array of the library in use."""


class Arrays(Protocol):
    """A library and a device. Names ending in `_` change their first argument in place."""

    name: str

    def put(self, values: NDArray[Any]) -> Array:
        """The array on the device; may share memory."""
        ...

    def get(self, array: Array) -> NDArray[Any]:
        """The array on the host."""
        ...

    def zeros(self, dimensions: Sequence[int]) -> Array:
        """Float64 zeros; memory that is never written should cost nothing."""
        ...

    def matmul(self, left: Array, right: Array) -> Array:
        """Matrix product over the last two axes."""
        ...

    def snap_(self, units: Array, factor: float) -> Array:
        """Scale, round to the nearest unit (ties to even), clip to the range of an activation."""
        ...

    def clip_(self, units: Array) -> Array:
        """Clip to the range of an activation."""
        ...

    def rint_(self, units: Array) -> Array:
        """Round to the nearest unit, ties to even."""
        ...

    def sqrt(self, array: Array) -> Array:
        """Square roots, correctly rounded."""
        ...

    def total(self, array: Array) -> Array:
        """Sums over the last axis, which stays."""
        ...

    def largest(self, array: Array) -> Array:
        """Maxima over the last axis, which stays."""
        ...

    def rows(self, array: Array, index: Array) -> Array:
        """`array[index]` for an index of one axis, as a copy."""
        ...

    def store_(self, array: Array, index: Array, rows: Array) -> None:
        """`array[index] = rows`."""
        ...

    def look_up(self, table: Array, index: Array, offset: int) -> Array:
        """`table[trunc(index) + offset]`, at most the last entry; `index` may be spoilt."""
        ...

    def hide_(self, scores: Array, mask: Array, value: float) -> None:
        """Set `scores` to `value` where the broadcast mask is true."""
        ...

    def best(self, logits: Array) -> list[int]:
        """Column of the largest value of each row, the lowest one of equals."""
        ...


class NumpyArrays:
    """See `Arrays`."""

    name = "numpy"

    def put(self, values: NDArray[Any]) -> NDArray[Any]:
        """See `Arrays.put`."""
        return values

    def get(self, array: NDArray[Any]) -> NDArray[Any]:
        """See `Arrays.get`."""
        return array

    def zeros(self, dimensions: Sequence[int]) -> Floats:
        """See `Arrays.zeros`."""
        return np.zeros(dimensions)

    def matmul(self, left: Floats, right: Floats) -> Floats:
        """See `Arrays.matmul`."""
        product: Floats = np.matmul(left, right)
        return product

    def snap_(self, units: Floats, factor: float) -> Floats:
        """See `Arrays.snap_`."""
        units *= factor
        np.rint(units, out=units)
        return self.clip_(units)

    def clip_(self, units: Floats) -> Floats:
        """See `Arrays.clip_`."""
        np.minimum(units, LIMIT, out=units)
        np.maximum(units, -LIMIT, out=units)
        return units

    def rint_(self, units: Floats) -> Floats:
        """See `Arrays.rint_`."""
        np.rint(units, out=units)
        return units

    def sqrt(self, array: Floats) -> Floats:
        """See `Arrays.sqrt`."""
        return np.sqrt(array)

    def total(self, array: Floats) -> Floats:
        """See `Arrays.total`."""
        sums: Floats = array.sum(axis=-1, keepdims=True)
        return sums

    def largest(self, array: Floats) -> Floats:
        """See `Arrays.largest`."""
        maxima: Floats = array.max(axis=-1, keepdims=True)
        return maxima

    def rows(self, array: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
        """See `Arrays.rows`."""
        return array.take(index, axis=0)

    def store_(self, array: Floats, index: NDArray[np.int64], rows: Floats) -> None:
        """See `Arrays.store_`."""
        array[index] = rows

    def look_up(self, table: Floats, index: Floats, offset: int) -> Floats:
        """See `Arrays.look_up`."""
        np.minimum(index, table.size - 1 - offset, out=index)
        places = index.astype(np.int64)
        if offset:
            places += offset
        return table.take(places)

    def hide_(self, scores: Floats, mask: NDArray[np.bool_], value: float) -> None:
        """See `Arrays.hide_`."""
        np.copyto(scores, value, where=mask)

    def best(self, logits: Floats) -> list[int]:
        """See `Arrays.best`."""
        columns: list[int] = logits.argmax(axis=-1).tolist()
        return columns
