"""The layers of the fast model in plain torch: where Triton is absent, and what its kernels are checked against."""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine_stub.model.shape import Shape
from engine_stub.model.torch_steps import Gathered, Step

Tensor = Any


class FastOps(Protocol):
    """The layers of the fast model. Matrices are `[out, in]`, activations `[rows, width]` in one dtype."""

    name: str
    tile_positions: int
    """Most positions of one item that attention handles at a time."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its RMSNorm."""
        ...

    def rotate_store(
        self, qkv: Tensor, turn: tuple[Tensor, Tensor], step: Step, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Turn Q and K by their positions, put K and V into the cache `[rows, kv heads, dim]`; Q `[rows, heads, dim]`."""
        ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        """Attention of all rows over their pages, `[rows, heads * dim]`."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `[rows, 2 width]`."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x weight^T`."""
        ...


class PlainOps:
    """See `FastOps`. With `is_invariant` products and attention run row by row: slow, and the same bits in any batch."""

    name = "torch"
    tile_positions = 1 << 30

    def __init__(self, shape: Shape, *, is_invariant: bool = False) -> None:
        self._shape = shape
        self._is_invariant = is_invariant

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `FastOps.norm`."""
        wide = x.float()
        mean = (wide * wide).mean(dim=-1, keepdim=True)
        scaled = (wide * (1.0 / torch.sqrt(mean + self._shape.norm_eps))).to(x.dtype)
        return scaled * weight

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `FastOps.add_norm`."""
        total = x + delta
        return total, self.norm(total, weight)

    def rotate_store(
        self, qkv: Tensor, turn: tuple[Tensor, Tensor], step: Step, keys: Tensor, values: Tensor
    ) -> Tensor:
        """See `FastOps.rotate_store`."""
        shape, half = self._shape, self._shape.head_dim // 2
        split = shape.heads + shape.kv_heads
        heads = qkv.view(len(qkv), split + shape.kv_heads, shape.head_dim)
        cosine, sine = (table[step.positions][:, None, :] for table in turn)
        low, high = heads[:, :split, :half].float(), heads[:, :split, half:].float()
        turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).to(qkv.dtype)
        keys[step.writes] = turned[:, shape.heads :]
        values[step.writes] = heads[:, split:]
        return turned[:, : shape.heads]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        """See `FastOps.attend`."""
        shape = self._shape
        out = torch.empty((len(query), shape.query_width), dtype=query.dtype, device=query.device)
        for gathered in step.gathered or self._gather(step, query.device):
            group, context = gathered.group, gathered.context
            rows = query[group.start : group.end]
            if self._is_invariant:
                positions = group.positions.reshape(-1).tolist()
                for row, position in enumerate(positions):
                    seen = context[row // group.new, : position + 1]
                    out[group.start + row] = self._attend_row(rows[row], keys[seen], values[seen])
                continue
            shared = (group.items, group.new, shape.kv_heads, shape.group, shape.head_dim)
            queries = rows.reshape(shared).swapaxes(1, 2)
            queries = queries.reshape(group.items, shape.kv_heads, group.new * shape.group, shape.head_dim)
            mixed = F.scaled_dot_product_attention(
                queries, keys[context].swapaxes(1, 2), values[context].swapaxes(1, 2), attn_mask=gathered.mask
            )
            mixed = mixed.reshape(group.items, shape.kv_heads, group.new, shape.group, shape.head_dim)
            out[group.start : group.end] = mixed.swapaxes(1, 2).reshape(-1, shape.query_width)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See `FastOps.swiglu`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `FastOps.linear`."""
        if not self._is_invariant:
            return F.linear(x, weight)
        # Copies, because a library may choose its kernel by the alignment of a row.
        rows = [F.linear(row[None].clone(), weight) for row in x]
        return torch.cat(rows) if rows else F.linear(x, weight)

    def _gather(self, step: Step, device: Any) -> list[Gathered]:
        """Put the groups of a step on the device, once for all layers."""
        for group in step.layout.groups:
            mask = None
            if not group.is_full:  # [items, 1, new * group, length]
                visible = torch.from_numpy(~group.hidden()).to(device)[:, None, :, None, :]
                mask = visible.expand(-1, -1, -1, self._shape.group, -1).flatten(2, 3)
            step.gathered.append(Gathered(group, torch.from_numpy(group.context).to(device), mask))
        return step.gathered

    def _attend_row(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One row over its own context: queries `[heads, dim]`, keys and values `[length, kv heads, dim]`."""
        shape = self._shape
        rows = query.reshape(shape.kv_heads, shape.group, shape.head_dim).float()
        scores = torch.matmul(rows, keys.permute(1, 2, 0).float()) / math.sqrt(shape.head_dim)
        numerators = torch.softmax(scores, dim=-1)
        return torch.matmul(numerators, values.swapaxes(0, 1).float()).reshape(-1).to(query.dtype)
