"""The fast model: floating point in torch, fused layers, paged K/V. CPU or CUDA."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from engine_stub.model import tables
from engine_stub.model.fixed import Floats
from engine_stub.model.shape import Shape
from engine_stub.model.torch_arrays import lowest_best
from engine_stub.model.torch_graphs import Capture, DecodeGraphs
from engine_stub.model.torch_plain import FastOps, PlainOps
from engine_stub.model.torch_steps import Step, of_items
from engine_stub.model.weights import Recorded, Tensors
from engine_stub.scheduler.plan import StepItem

Tensor = Any


class FastLayer(msgspec.Struct, frozen=True):
    """Weights of one layer; matrices `[out, in]`, those that read the same input on top of each other."""

    attention_norm: Tensor
    query_key_value: Tensor
    output: Tensor
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FastWeights(msgspec.Struct, frozen=True):
    """All weights on one device in one dtype. `digest`: SHA-256 of the real values."""

    shape: Shape
    embedding: Tensor
    layers: list[FastLayer]
    norm: Tensor
    head: Tensor
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.shape.parameters * int(self.embedding.element_size())


class FastModel:
    """Weights, layers and a K/V pool of `blocks` blocks of `block_size` positions."""

    def __init__(self, weights: FastWeights, ops: FastOps, *, blocks: int, block_size: int, positions: int) -> None:
        shape, embedding = weights.shape, weights.embedding
        self.shape = shape
        self.block_size = block_size
        self.ops = ops
        self.weights = weights
        self.device = embedding.device
        # One spare block: what padding rows of a graph write to.
        cache = (shape.layers, (blocks + 1) * block_size, shape.kv_heads, shape.head_dim)
        self._keys = torch.zeros(cache, dtype=embedding.dtype, device=self.device)
        self._values = torch.zeros(cache, dtype=embedding.dtype, device=self.device)
        self._turn = tuple(
            torch.from_numpy(table * 2.0**-tables.ROPE_BITS).to(device=self.device, dtype=torch.float32)
            for table in tables.rotary(shape, positions)
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton and graphs use the current one
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and ops.name == "triton":
            self.use_graphs()

    def layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, `[rows, kv heads, dim]`."""
        return self._keys[layer], self._values[layer]

    def fill_cache(self) -> None:
        """Random K and V, for benchmarks: a GPU is faster on zeros."""
        self._keys.normal_()
        self._values.normal_()

    def use_graphs(self, capture: Capture | None = None) -> None:
        """Run decode steps by replaying graphs; `capture` records one (default: CUDA)."""
        spare = self._keys.shape[1] // self.block_size - 1
        self._graphs = DecodeGraphs(
            self.run, block_size=self.block_size, pad_block=spare, device=self.device, capture=capture
        )

    def forward(self, items: Sequence[StepItem]) -> "FastLogits":
        """One row of logits per item that needs a token; stores the K and V of all items."""
        if self._graphs is not None and all(len(item.token_ids) == 1 and item.needs_token for item in items):
            return FastLogits(self._graphs.forward(items))
        return FastLogits(self.run(of_items(items, self.block_size, self.ops.tile_positions, self.device)))

    def run(self, step: Step) -> Tensor:
        """Logits `[wanted, vocab]` in float32."""
        ops, weights = self.ops, self.weights
        x = weights.embedding[step.tokens]
        normed = ops.norm(x, weights.layers[0].attention_norm)
        for index, layer in enumerate(weights.layers):
            keys, values = self._keys[index], self._values[index]
            query = ops.rotate_store(ops.linear(normed, layer.query_key_value), self._turn, step, keys, values)
            mixed = ops.attend(query, keys, values, step)
            x, normed = ops.add_norm(x, ops.linear(mixed, layer.output), layer.feed_forward_norm)
            delta = ops.linear(ops.swiglu(ops.linear(normed, layer.gate_up)), layer.down)
            is_last = index + 1 == len(weights.layers)
            if is_last:  # only rows that yield a token go on
                x, delta = x[step.wanted], delta[step.wanted]
            following = weights.norm if is_last else weights.layers[index + 1].attention_norm
            x, normed = ops.add_norm(x, delta, following)
        return ops.linear(normed, weights.head).float()


class FastLogits:
    """See `engine_stub.model.backend.LogitRows`."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def row(self, index: int) -> Floats:
        """See `LogitRows.row`."""
        row: Floats = self.values[index].double().cpu().numpy()
        return row

    def ban(self, row: int | None, ids: Sequence[int]) -> None:
        """See `LogitRows.ban`."""
        self.values[slice(None) if row is None else row, list(ids)] = float("-inf")

    def best(self) -> list[int]:
        """See `LogitRows.best`."""
        return lowest_best(self.values)


def random_weights(shape: Shape, device: str, dtype: str, seed: int = 0) -> FastWeights:
    """Normal weights of variance 1/inputs made on the device: for benchmarks, where hashing 8 billion would take minutes.

    They depend on torch and the device, so their digest is empty.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    kind = getattr(torch, dtype)

    def matrix(outputs: int, inputs: int) -> Tensor:
        values = torch.empty((outputs, inputs), device=device, dtype=kind)
        return values.normal_(std=inputs**-0.5, generator=generator)

    def layer() -> FastLayer:
        return FastLayer(
            attention_norm=torch.ones(shape.hidden, device=device, dtype=kind),
            query_key_value=matrix(shape.query_width + 2 * shape.kv_width, shape.hidden),
            output=matrix(shape.hidden, shape.query_width),
            feed_forward_norm=torch.ones(shape.hidden, device=device, dtype=kind),
            gate_up=matrix(2 * shape.intermediate, shape.hidden),
            down=matrix(shape.hidden, shape.intermediate),
        )

    return FastWeights(
        shape=shape,
        embedding=torch.empty((shape.vocab_size, shape.hidden), device=device, dtype=kind).normal_(generator=generator),
        layers=[layer() for _ in range(shape.layers)],
        norm=torch.ones(shape.hidden, device=device, dtype=kind),
        head=matrix(shape.vocab_size, shape.hidden),
        digest="",
    )


def choose_ops(shape: Shape, device: str, *, is_invariant: bool = False) -> FastOps:
    """Triton's kernels on a GPU that has Triton, plain torch elsewhere."""
    if torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None:
        from engine_stub.model.torch_triton import TritonOps  # noqa: PLC0415 - only where there is Triton

        return TritonOps(shape, is_invariant=is_invariant)
    return PlainOps(shape, is_invariant=is_invariant)


def load(shape: Shape, source: Tensors, device: str, dtype: str) -> FastWeights:
    """Read all weights; raises `ModelError`."""
    recorded = Recorded(source)
    dimensions = dict(shape.tensors())

    def tensor(*names: str) -> Tensor:
        values = [recorded.tensor(f"{name}.weight", dimensions[f"{name}.weight"]) for name in names]
        return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=getattr(torch, dtype))

    def layer(index: int) -> FastLayer:
        prefix = f"model.layers.{index}."
        attention, feed_forward = prefix + "self_attn.", prefix + "mlp."
        return FastLayer(
            attention_norm=tensor(prefix + "input_layernorm"),
            query_key_value=tensor(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            output=tensor(attention + "o_proj"),
            feed_forward_norm=tensor(prefix + "post_attention_layernorm"),
            gate_up=tensor(feed_forward + "gate_proj", feed_forward + "up_proj"),
            down=tensor(feed_forward + "down_proj"),
        )

    embedding = tensor("model.embed_tokens")
    return FastWeights(
        shape=shape,
        embedding=embedding,
        layers=[layer(index) for index in range(shape.layers)],
        norm=tensor("model.norm"),
        head=embedding if shape.tie_embeddings else tensor("lm_head"),
        digest=recorded.digest(),
    )
