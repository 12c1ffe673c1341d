"""The exact model's array operations on torch, CPU or CUDA. See `arrays`.

Eager operations only: a compiler might fuse a rounded product with the sum behind it. Float64 is native on
data-centre GPUs; a matrix product that is emulated from smaller formats would have to be switched off
(`engine-stub selftest --bits --device cuda` tells).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_stub.model.arrays import Array
from engine_stub.model.fixed import LIMIT


class TorchArrays:
    """See `Arrays`. `device` as torch names it."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def put(self, values: NDArray[Any]) -> Array:
        """See `Arrays.put`."""
        return torch.from_numpy(values if values.flags.writeable else values.copy()).to(self.device)

    def get(self, array: Array) -> NDArray[Any]:
        """See `Arrays.get`."""
        values: NDArray[Any] = array.cpu().numpy()
        return values

    def zeros(self, dimensions: Sequence[int]) -> Array:
        """See `Arrays.zeros`."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.zeros(dimensions))  # the system's zero pages; torch would write them
        return torch.zeros(tuple(dimensions), dtype=torch.float64, device=self.device)

    def matmul(self, left: Array, right: Array) -> Array:
        """See `Arrays.matmul`."""
        return torch.matmul(left, right)

    def snap_(self, units: Array, factor: float) -> Array:
        """See `Arrays.snap_`."""
        return units.mul_(factor).round_().clamp_(-LIMIT, LIMIT)

    def clip_(self, units: Array) -> Array:
        """See `Arrays.clip_`."""
        return units.clamp_(-LIMIT, LIMIT)

    def rint_(self, units: Array) -> Array:
        """See `Arrays.rint_`."""
        return units.round_()

    def sqrt(self, array: Array) -> Array:
        """See `Arrays.sqrt`."""
        return torch.sqrt(array)

    def total(self, array: Array) -> Array:
        """See `Arrays.total`."""
        return array.sum(dim=-1, keepdim=True)

    def largest(self, array: Array) -> Array:
        """See `Arrays.largest`."""
        return array.amax(dim=-1, keepdim=True)

    def rows(self, array: Array, index: Array) -> Array:
        """See `Arrays.rows`."""
        return array.index_select(0, index)

    def store_(self, array: Array, index: Array, rows: Array) -> None:
        """See `Arrays.store_`."""
        array[index] = rows

    def look_up(self, table: Array, index: Array, offset: int) -> Array:
        """See `Arrays.look_up`."""
        places = index.clamp_(max=float(len(table) - 1 - offset)).to(torch.int64)
        return table[places + offset if offset else places]

    def hide_(self, scores: Array, mask: Array, value: float) -> None:
        """See `Arrays.hide_`."""
        scores.masked_fill_(mask, value)

    def best(self, logits: Array) -> list[int]:
        """See `Arrays.best`."""
        return lowest_best(logits)


def lowest_best(rows: Array) -> list[int]:
    """Column of the largest value of each row, the lowest one of equals; `torch.argmax` may return any of them.

    Raises ArithmeticError for a row with a NaN.
    """
    width = rows.shape[1]
    columns = torch.arange(width, device=rows.device)
    is_best = rows == rows.amax(dim=-1, keepdim=True)
    places: list[int] = torch.where(is_best, columns, width).amin(dim=-1).tolist()
    if width in places:
        raise ArithmeticError(f"the logits of row {places.index(width)} are not numbers: there is no largest one")
    return places
