"""The exact model: a dense Llama in fixed point, the same source for numpy and torch. See `fixed` for why.

All activations are integers in float64, in units of 2^-12; comments give bounds in bits of a unit.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from engine_stub.model import fixed, tables
from engine_stub.model.arrays import Array, Arrays
from engine_stub.model.layout import Group, Layout, build
from engine_stub.model.shape import Shape
from engine_stub.model.weights import Recorded, Tensors, Values
from engine_stub.scheduler.plan import StepItem

CONTEXT_ELEMENTS = 1 << 23
"""Elements of K (and of V) that attention gathers at a time: 64 MiB. How it is cut changes no bit."""
SCORE_ELEMENTS = 1 << 22
"""Scores that are held at a time."""
HIDDEN_SCORE = -(2.0**60)
"""Below every real score by more than the softmax table is long."""


class Layer(msgspec.Struct, frozen=True):
    """Weights of one layer in units; matrices `[in, out]`, those that read the same input side by side."""

    attention_norm: Array
    query_key_value: Array
    output: Array
    feed_forward_norm: Array
    gate_up: Array
    down: Array


class ExactWeights(msgspec.Struct, frozen=True):
    """All weights on one device, read-only: ranks of a process share them. `digest`: SHA-256 of the real values."""

    shape: Shape
    arrays: Arrays
    embedding: Array
    layers: list[Layer]
    norm: Array
    head: Array
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return 8 * self.shape.parameters


class ExactModel:
    """Weights and a K/V pool of `blocks` blocks of `block_size` positions. Raises `ModelError`."""

    numerics = "exact"

    def __init__(self, weights: ExactWeights, *, blocks: int, block_size: int, positions: int) -> None:
        shape = weights.shape
        fixed.check(shape)
        self.shape = shape
        self.arrays = weights.arrays
        self.block_size = block_size
        self.weights = weights
        dimensions = (shape.layers, blocks * block_size, shape.kv_heads, shape.head_dim)
        self._keys = self.arrays.zeros(dimensions)
        self._values = self.arrays.zeros(dimensions)
        cosine, sine = tables.rotary(shape, positions)
        self._cosine, self._sine = self.arrays.put(cosine), self.arrays.put(sine)
        self._softmax = self.arrays.put(tables.softmax_numerators())
        self._silu = self.arrays.put(tables.silu())
        self._epsilon = shape.norm_eps / fixed.LOGIT_UNIT  # squares are in units of 2^-24
        # A score is a sum of products in units of 2^-24; a step of the softmax table is 2^-12.
        self._score_scale = fixed.GRID / math.sqrt(shape.head_dim)

    def forward(self, items: Sequence[StepItem]) -> "ExactLogits":
        """One row of logits per item that needs a token; stores the K and V of all items."""
        return ExactLogits(self._run(build(items, self.block_size)), self.arrays)

    def _run(self, layout: Layout) -> Array:
        xp, weights = self.arrays, self.weights
        writes, positions = xp.put(layout.writes), xp.put(layout.positions)
        turn = (xp.rows(self._cosine, positions)[:, None, :], xp.rows(self._sine, positions)[:, None, :])
        groups = [placed for group in layout.groups for placed in place(group, self.shape, xp)]
        x = xp.rows(weights.embedding, xp.put(layout.tokens))
        for index, layer in enumerate(weights.layers):
            fused = xp.snap_(xp.matmul(self.norm(x, layer.attention_norm), layer.query_key_value), fixed.GRID)
            query = self._store(index, fused, turn, writes)
            mixed = self.attend(index, query, groups)
            x = xp.clip_(x + xp.snap_(xp.matmul(mixed, layer.output), fixed.GRID))
            x = xp.clip_(x + self.feed_forward(self.norm(x, layer.feed_forward_norm), layer))
        last = xp.rows(x, xp.put(layout.wanted))
        return xp.matmul(self.norm(last, weights.norm), weights.head)

    def norm(self, x: Array, weight: Array) -> Array:
        """RMSNorm; the sum of squares has at most 36 + log2(hidden) bits."""
        xp = self.arrays
        root = xp.sqrt(xp.total(x * x) / self.shape.hidden + self._epsilon)
        return xp.snap_(x / root * weight, 1.0)

    def _store(self, layer: int, fused: Array, turn: tuple[Array, Array], writes: Array) -> Array:
        """Turn Q and K by their positions, put K and V into the pool; Q `[rows, heads, head_dim]`."""
        shape = self.shape
        split = shape.heads + shape.kv_heads
        heads = fused.reshape(len(fused), split + shape.kv_heads, shape.head_dim)
        self._rotate_(heads[:, :split], turn)
        self.arrays.store_(self._keys[layer], writes, heads[:, shape.heads : split])
        self.arrays.store_(self._values[layer], writes, heads[:, split:])
        return heads[:, : shape.heads]

    def _rotate_(self, heads: Array, turn: tuple[Array, Array]) -> None:
        """Rotary positions on pairs (i, i + head_dim / 2); each product has 38 bits, their sum is exact."""
        xp, half = self.arrays, self.shape.head_dim // 2
        cosine, sine = turn
        low, high = heads[..., :half], heads[..., half:]
        turned_low = low * cosine - high * sine
        turned_high = high * cosine + low * sine
        low[...] = xp.snap_(turned_low, 2.0**-tables.ROPE_BITS)
        high[...] = xp.snap_(turned_high, 2.0**-tables.ROPE_BITS)

    def attend(self, layer: int, query: Array, groups: "list[PlacedGroup]") -> Array:
        """Attention of all rows over their contexts, `[rows, heads * head_dim]`."""
        outputs = [self._attend_group(layer, query, group) for group in groups]
        if len(outputs) == 1:
            return outputs[0]
        mixed = self.arrays.zeros((len(query), self.shape.query_width))
        for group, output in zip(groups, outputs, strict=True):
            mixed[group.start : group.end] = output
        return mixed

    def _attend_group(self, layer: int, query: Array, group: "PlacedGroup") -> Array:
        """One batched product per K/V head; the queries that share the head are its rows, so K is never repeated."""
        xp, shape = self.arrays, self.shape
        items, new, length = group.items, group.new, group.length
        kv_dimensions = (items, length, shape.kv_heads, shape.head_dim)
        keys = xp.rows(self._keys[layer], group.context).reshape(kv_dimensions).swapaxes(1, 2)
        values = xp.rows(self._values[layer], group.context).reshape(kv_dimensions).swapaxes(1, 2)
        rows = query[group.start : group.end].reshape(items, new, shape.heads, shape.head_dim)
        at_once = max(1, SCORE_ELEMENTS // (items * shape.heads * length))
        if at_once >= new:
            return self._attend_rows(rows, keys, values, group.mask).reshape(items * new, shape.query_width)
        mixed = xp.zeros((items, new, shape.query_width))
        for first in range(0, new, at_once):
            part = slice(first, first + at_once)
            mask = None if group.mask is None else group.mask[:, :, part]
            mixed[:, part] = self._attend_rows(rows[:, part], keys, values, mask)
        return mixed.reshape(items * new, shape.query_width)

    def _attend_rows(self, rows: Array, keys: Array, values: Array, mask: Array | None) -> Array:
        """Queries `[items, new, heads, dim]` over K and V `[items, kv, length, dim]`: `[items, new, heads * dim]`."""
        xp, shape = self.arrays, self.shape
        items, new, length = len(rows), rows.shape[1], keys.shape[2]
        grouped = (items, shape.kv_heads, new, shape.group, shape.head_dim)
        rows = rows.reshape(items, new, shape.kv_heads, shape.group, shape.head_dim).swapaxes(1, 2)
        rows = rows.reshape(items, shape.kv_heads, new * shape.group, shape.head_dim)
        scores = xp.matmul(rows, keys.swapaxes(2, 3))  # 36 + log2(head_dim) bits
        if mask is not None:
            xp.hide_(scores.reshape(items, shape.kv_heads, new, shape.group, length), mask, HIDDEN_SCORE)
        distance = xp.largest(scores) - scores
        distance *= self._score_scale
        numerators = xp.look_up(self._softmax, distance, 0)
        # A hidden position has numerator 0, whatever its cache row holds.
        mixed = xp.rint_(self._weighted(numerators, values) / xp.total(numerators))
        return mixed.reshape(grouped).swapaxes(1, 2).reshape(items, new, shape.query_width)

    def _weighted(self, numerators: Array, values: Array) -> Array:
        """Sum over positions, exact within a piece; pieces begin at fixed positions and are added in their order."""
        piece = fixed.EXACT_POSITIONS
        result = self.arrays.matmul(numerators[..., :piece], values[..., :piece, :])
        for start in range(piece, values.shape[2], piece):
            result = result + self.arrays.matmul(
                numerators[..., start : start + piece], values[..., start : start + piece, :]
            )
        return result

    def feed_forward(self, x: Array, layer: Layer) -> Array:
        """SwiGLU between two products; `x` is normalised."""
        xp, width = self.arrays, self.shape.intermediate
        fused = xp.snap_(xp.matmul(x, layer.gate_up), fixed.GRID)
        product = xp.look_up(self._silu, fused[:, :width], int(fixed.LIMIT))
        product *= fused[:, width:]
        return xp.snap_(xp.matmul(xp.snap_(product, fixed.GRID), layer.down), fixed.GRID)


class ExactLogits:
    """See `engine_stub.model.backend.LogitRows`; `units` `[rows, vocab]` are exact multiples of 2^-24."""

    def __init__(self, units: Array, arrays: Arrays) -> None:
        self.units = units
        self._arrays = arrays

    def row(self, index: int) -> fixed.Floats:
        """See `LogitRows.row`."""
        row: fixed.Floats = self._arrays.get(self.units[index]) * fixed.LOGIT_UNIT
        return row

    def ban(self, row: int | None, ids: Sequence[int]) -> None:
        """See `LogitRows.ban`."""
        self.units[slice(None) if row is None else row, list(ids)] = -math.inf

    def best(self) -> list[int]:
        """See `LogitRows.best`."""
        return self._arrays.best(self.units)


class PlacedGroup(msgspec.Struct, frozen=True):
    """Items of a group with index arrays on the device; `mask` `[items, 1, new, 1, length]` or None."""

    start: int
    end: int
    items: int
    new: int
    length: int
    context: Array
    mask: Array | None


def place(group: Group, shape: Shape, xp: Arrays) -> Iterator[PlacedGroup]:
    """The group on a device, in parts of so many items that a part's K and V fit into memory at once."""
    length = group.context.shape[1]
    at_once = max(1, CONTEXT_ELEMENTS // (length * shape.kv_width))
    hidden = None if group.is_full else group.hidden()[:, None, :, None, :]
    for first in range(0, group.items, at_once):
        last = min(first + at_once, group.items)
        yield PlacedGroup(
            start=group.start + first * group.new,
            end=group.start + last * group.new,
            items=last - first,
            new=group.new,
            length=length,
            context=xp.put(group.context[first:last].reshape(-1)),
            mask=None if hidden is None else xp.put(hidden[first:last]),
        )


def load(shape: Shape, source: Tensors, arrays: Arrays) -> ExactWeights:
    """Read and round all weights; raises `ModelError`."""
    recorded = Recorded(source)
    dimensions = dict(shape.tensors())

    def real(name: str) -> Values:
        return recorded.tensor(f"{name}.weight", dimensions[f"{name}.weight"])

    def matrix(*names: str) -> Array:
        """Matrices that read the same input as one `[in, out]`."""
        return arrays.put(np.ascontiguousarray(fixed.weights(np.concatenate([real(name) for name in names])).T))

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention, feed_forward = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=arrays.put(fixed.weights(real(prefix + "input_layernorm"))),
            query_key_value=matrix(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            output=matrix(attention + "o_proj"),
            feed_forward_norm=arrays.put(fixed.weights(real(prefix + "post_attention_layernorm"))),
            gate_up=matrix(feed_forward + "gate_proj", feed_forward + "up_proj"),
            down=matrix(feed_forward + "down_proj"),
        )

    embedding = real("model.embed_tokens")
    return ExactWeights(
        shape=shape,
        arrays=arrays,
        embedding=arrays.put(fixed.activations(embedding)),
        layers=[layer(index) for index in range(shape.layers)],
        norm=arrays.put(fixed.weights(real("model.norm"))),
        head=matrix("model.embed_tokens" if shape.tie_embeddings else "lm_head"),
        digest=recorded.digest(),
    )
