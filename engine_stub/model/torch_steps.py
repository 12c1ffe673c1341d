"""A step of the fast model as tensors on the device."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from engine_stub.model.layout import Group, Ints, Layout, block_tables, build
from engine_stub.scheduler.plan import StepItem

Tensor = Any

PART_ROWS = 1024
"""Rows of items with several tokens that are handled at a time: bounds the scratch memory of attention."""


class Tiles(msgspec.Struct, frozen=True):
    """Runs of consecutive positions of one item that cover the rows `start .. end - 1` of a step.

    `columns` (int32 `[4, tiles]`): item, first row after `start`, number of positions, first position.
    `longest` is the largest context, `is_decode` says that every tile is one row.
    """

    start: int
    end: int
    columns: Tensor
    longest: int
    is_decode: bool


class Step(msgspec.Struct, frozen=True):
    """Columns over token rows (int64), the rows whose logits are due, and where attention finds its keys.

    `tables` `[items, width]` (int32) are block tables in the order of the rows' items. `layout` says the
    same to the plain path.
    """

    tokens: Tensor
    positions: Tensor
    writes: Tensor
    wanted: Tensor
    tables: Tensor
    tiles: list[Tiles]
    layout: Layout
    block_size: int
    gathered: list["Gathered"] = []
    """What the plain path needs, made by the first layer."""


class Gathered(msgspec.Struct, frozen=True):
    """A group of the layout on the device: cache rows `[items, length]`, mask of what may be seen or None."""

    group: Group
    context: Tensor
    mask: Tensor | None


def of_items(
    items: Sequence[StepItem], block_size: int, tile_positions: int, device: Any, table_width: int = 0
) -> Step:
    """The step of a plan's items, with tiles of up to `tile_positions` positions for items of several tokens.

    Block tables are padded to at least `table_width` blocks.
    """
    layout = build(items, block_size)
    ordered = [items[index] for index in layout.order]

    def put(values: Ints, dtype: Any = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype, non_blocking=True)

    return Step(
        tokens=put(layout.tokens),
        positions=put(layout.positions),
        writes=put(layout.writes),
        wanted=put(layout.wanted),
        tables=put(block_tables(ordered, block_size, table_width), torch.int32),
        tiles=[
            Tiles(start, end, put(columns, torch.int32), longest, is_decode)
            for start, end, columns, longest, is_decode in _parts(ordered, tile_positions)
        ],
        layout=layout,
        block_size=block_size,
    )


def to_device(step: Step, device: Any) -> Step:
    """A copy on another device."""
    return Step(
        **{name: getattr(step, name).to(device, copy=True) for name in _COLUMNS},
        tiles=[msgspec.structs.replace(tiles, columns=tiles.columns.to(device, copy=True)) for tiles in step.tiles],
        layout=step.layout,
        block_size=step.block_size,
    )


def overwrite(step: Step, fresh: Step) -> None:
    """Copy the tensors of an equally large step into those of `step`."""
    for name in _COLUMNS:
        getattr(step, name).copy_(getattr(fresh, name), non_blocking=True)
    for tiles, others in zip(step.tiles, fresh.tiles, strict=True):
        tiles.columns.copy_(others.columns, non_blocking=True)


_COLUMNS = ("tokens", "positions", "writes", "wanted", "tables")


def _parts(ordered: list[StepItem], tile_positions: int) -> Iterator[tuple[int, int, Ints, int, bool]]:
    """Start, end, columns, longest context and kind: the decode rows, then the rest in parts."""
    start = end = longest = 0
    tiles: list[tuple[int, int, int, int]] = []
    is_decode = True
    for index, item in enumerate(ordered):
        if is_decode and len(item.token_ids) > 1:
            if tiles:
                yield start, end, np.array(tiles).T.copy(), longest, True
            start, longest, tiles, is_decode = end, 0, [], False
        for offset in range(0, len(item.token_ids), tile_positions):
            count = min(tile_positions, len(item.token_ids) - offset)
            if not is_decode and end + count - start > PART_ROWS:
                yield start, end, np.array(tiles).T.copy(), longest, False
                start, longest, tiles = end, 0, []
            tiles.append((index, end - start, count, item.start + offset))
            end += count
            longest = max(longest, item.start + offset + count)
    yield start, end, np.array(tiles).T.copy(), longest, is_decode
