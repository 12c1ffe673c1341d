"""Where everything of a step is: one flat list of token rows for the fused layers, groups of rows for attention.

Rows of items with as many new tokens and a context of like size (within a factor 2) lie side by side, so
that a group is one batched product over a padded context. All decodes of like length are one group.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_stub.scheduler.plan import StepItem

Ints = NDArray[np.int64]

SMALLEST_BUCKET_BITS = 5
"""Contexts of up to 32 positions count as alike."""


class Group(msgspec.Struct, frozen=True):
    """Rows `start .. start + items * new - 1`, item by item, and the K/V rows that they attend to.

    `context` `[items, longest]` holds cache rows by position (0 where an item has no such position),
    `positions` `[items, new]` the positions of the rows: a row sees the positions up to its own.
    """

    start: int
    items: int
    new: int
    context: Ints
    positions: Ints
    is_full: bool
    """Every row sees the whole context: no mask is needed."""

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.start + self.items * self.new

    def hidden(self) -> NDArray[np.bool_]:
        """`[items, new, longest]`: positions that a row must not see."""
        return np.arange(self.context.shape[1]) > self.positions[:, :, None]


class Layout(msgspec.Struct, frozen=True):
    """A step over `tokens` rows. Columns: token id, position, cache row to write; then the groups.

    `wanted` are the rows whose logits are due, in the order of the items that need a token; `order` are
    the numbers of the items in the order of their rows: decodes first.
    """

    tokens: Ints
    positions: Ints
    writes: Ints
    wanted: Ints
    order: list[int]
    groups: list[Group]


def build(items: Sequence[StepItem], block_size: int) -> Layout:
    """The layout of a step's items; raises ValueError for an item without tokens."""
    order = sorted(range(len(items)), key=lambda index: _kind(items[index]))
    groups: list[Group] = []
    writes: list[Ints] = []
    last_rows = [0] * len(items)
    start = first = 0
    while first < len(order):
        kind = _kind(items[order[first]])
        end = first
        while end < len(order) and _kind(items[order[end]]) == kind:
            end += 1
        members = order[first:end]
        group, written = _group([items[index] for index in members], start, block_size)
        for place, index in enumerate(members):
            last_rows[index] = start + (place + 1) * group.new - 1
        groups.append(group)
        writes.append(written)
        start, first = group.end, end
    return Layout(
        tokens=np.fromiter(_tokens(items, order), dtype=np.int64, count=start),
        positions=np.concatenate([group.positions.reshape(-1) for group in groups]),
        writes=np.concatenate(writes),
        wanted=np.array([row for row, item in zip(last_rows, items, strict=True) if item.needs_token], dtype=np.int64),
        order=order,
        groups=groups,
    )


def block_tables(items: Sequence[StepItem], block_size: int, width: int = 0) -> Ints:
    """Block tables `[items, most]` as far as their texts reach, padded with block 0 to `width` or more."""
    counts = [-(-item.end // block_size) for item in items]
    tables = np.zeros((len(items), max(width, *counts)), dtype=np.int64)
    for row, item, count in zip(tables, items, counts, strict=True):
        row[:count] = item.block_table[:count]
    return tables


def _kind(item: StepItem) -> tuple[int, int]:
    if not item.token_ids:
        raise ValueError(f"{item.request_id}: an item without tokens has nothing to compute")
    return len(item.token_ids), max(SMALLEST_BUCKET_BITS, (item.end - 1).bit_length())


def _tokens(items: Sequence[StepItem], order: list[int]) -> Iterator[int]:
    for index in order:
        yield from items[index].token_ids


def _group(items: list[StepItem], start: int, block_size: int) -> tuple[Group, Ints]:
    """One group and the cache rows that it writes, in the order of its token rows."""
    new = len(items[0].token_ids)
    ends = [item.end for item in items]
    longest = max(ends)
    tables = block_tables(items, block_size)
    rows = (tables[:, :, None] * block_size + np.arange(block_size)).reshape(len(items), -1)
    positions = np.array([item.start for item in items])[:, None] + np.arange(new)
    writes = np.take_along_axis(rows, positions, axis=1)
    is_full = new == 1 and min(ends) == longest
    return Group(start, len(items), new, rows[:, :longest], positions, is_full), writes.reshape(-1)
