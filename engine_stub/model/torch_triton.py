"""Launches the Triton kernels. Importing this needs Triton; on a CPU it runs only under `TRITON_INTERPRET=1`."""

import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import triton

from engine_stub.model import triton_kernels as kernels
from engine_stub.model.shape import Shape
from engine_stub.model.torch_steps import Step, Tiles

Tensor = Any

DECODE_ROWS = 16
"""Fewest rows of a matrix product on tensor cores: a decode row's queries, padded."""
PREFILL_ROWS = 64
KEYS = 64
"""Positions of a context that a program reads at a time."""
SPLIT = 512
"""Positions of a context that one program of a decode covers: a size, not a count, so a row's sums never move."""
SWIGLU_BLOCK = 1024
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonOps:
    """See `FastOps`. With `is_invariant` products run in fixed tiles and all rows go the way of decodes."""

    name = "triton"

    def __init__(self, shape: Shape, *, is_invariant: bool = False) -> None:
        self._shape = shape
        self._is_invariant = is_invariant
        self._decode_rows = max(DECODE_ROWS, triton.next_power_of_2(shape.group))
        self._prefill_rows = self._decode_rows if is_invariant else max(PREFILL_ROWS, self._decode_rows)
        self.tile_positions = self._prefill_rows // shape.group
        self._dims = max(16, triton.next_power_of_2(shape.head_dim))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `FastOps.norm`."""
        return self._norm(x, None, weight)[1]

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `FastOps.add_norm`."""
        return self._norm(x, delta, weight)

    def rotate_store(
        self, qkv: Tensor, turn: tuple[Tensor, Tensor], step: Step, keys: Tensor, values: Tensor
    ) -> Tensor:
        """See `FastOps.rotate_store`."""
        shape, half = self._shape, self._shape.head_dim // 2
        query = torch.empty((len(qkv), shape.heads, shape.head_dim), dtype=qkv.dtype, device=qkv.device)
        kernels.rotate_store[(len(qkv), shape.heads + 2 * shape.kv_heads)](
            qkv, turn[0], turn[1], step.positions, step.writes, query, keys, values,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, HALF=half, BLOCK=triton.next_power_of_2(half),
            num_warps=1,
        )  # fmt: skip
        return query

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        """See `FastOps.attend`."""
        out = torch.empty_like(query)
        for tiles in step.tiles:
            if tiles.is_decode or self._is_invariant:
                self._attend_split(query, keys, values, step, tiles, out)
            else:
                self._attend_whole(query, keys, values, step, tiles, out)
        return out.view(len(query), self._shape.query_width)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See `FastOps.swiglu`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        block = min(SWIGLU_BLOCK, triton.next_power_of_2(width))
        kernels.swiglu[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
        return out

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `FastOps.linear`."""
        if not self._is_invariant or not len(x):
            return F.linear(x, weight)
        x = x.contiguous()
        rows, width = len(x), len(weight)
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        kernels.linear[(triton.cdiv(width, 64), triton.cdiv(rows, 64))](
            x, weight, out, rows, width, x.shape[1],
            BLOCK_ROWS=64, BLOCK_WIDTH=64, BLOCK_INNER=64, UPCAST=IS_INTERPRETED, num_stages=4,
        )  # fmt: skip
        return out

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        total, out = torch.empty_like(x), torch.empty_like(x)
        if rows:
            kernels.rms_norm[(rows,)](
                x, x if delta is None else delta, weight, total, out, width, self._shape.norm_eps,
                HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
        return total, out

    def _attend_whole(self, query: Tensor, keys: Tensor, values: Tensor, step: Step, tiles: Tiles, out: Tensor) -> None:
        rows = slice(tiles.start, tiles.end)
        self._launch(query[rows], keys, values, step, tiles, (out[rows], out, out), splits=1, is_partial=False)

    def _attend_split(self, query: Tensor, keys: Tensor, values: Tensor, step: Step, tiles: Tiles, out: Tensor) -> None:
        shape, count = self._shape, tiles.end - tiles.start
        rows = slice(tiles.start, tiles.end)
        splits = triton.cdiv(tiles.longest, SPLIT)
        cells = (count, shape.heads, splits)
        partial = torch.empty((*cells, shape.head_dim), dtype=torch.float32, device=query.device)
        largest = torch.empty(cells, dtype=torch.float32, device=query.device)
        total = torch.empty(cells, dtype=torch.float32, device=query.device)
        self._launch(query[rows], keys, values, step, tiles, (partial, largest, total), splits=splits, is_partial=True)
        kernels.reduce_splits[(count, shape.heads)](
            partial, largest, total, step.positions[rows], out[rows], splits,
            HEADS=shape.heads, HEAD_DIM=shape.head_dim, DIMS=self._dims, SPLIT=SPLIT, num_warps=1,
        )  # fmt: skip

    def _launch(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        tiles: Tiles,
        results: tuple[Tensor, Tensor, Tensor],
        *,
        splits: int,
        is_partial: bool,
    ) -> None:
        shape = self._shape
        item, row, count, position = tiles.columns
        kernels.paged_attention[(len(item), shape.kv_heads, splits)](
            query, keys, values, step.tables, item, row, count, position, *results,
            shape.head_dim**-0.5, step.tables.shape[1], splits,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, HEAD_DIM=shape.head_dim, DIMS=self._dims,
            PAGE=step.block_size, ROWS=self._decode_rows if is_partial else self._prefill_rows,
            KEYS=KEYS, SPLIT=SPLIT, PARTIAL=is_partial, UPCAST=IS_INTERPRETED,
        )  # fmt: skip
