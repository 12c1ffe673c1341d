"""The textbook loop that batching is measured against: one text at a time, one token at a time.

Plain eager floating point over the same weights, K/V appended to arrays that grow; numpy or torch.
"""

from types import ModuleType
from typing import Any

from engine_stub.model import tables
from engine_stub.model.shape import Shape
from engine_stub.model.weights import Tensors, Values

Array = Any


class PlainLoop:
    """`library` is numpy or torch; `convert` brings a float32 array to it."""

    def __init__(self, shape: Shape, source: Tensors, library: ModuleType, convert: Any, positions: int) -> None:
        self._shape = shape
        self._xp = library
        dimensions = dict(shape.tensors())
        self._weights = {name: convert(source.tensor(name, size)) for name, size in dimensions.items()}
        scale = 2.0**-tables.ROPE_BITS
        self._turn = [convert(_single(table * scale)) for table in tables.rotary(shape, positions)]
        self._head = "model.embed_tokens" if shape.tie_embeddings else "lm_head"
        self._groups = [head // shape.group for head in range(shape.heads)]

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy continuation."""
        cache: list[tuple[Array, Array] | None] = [None] * self._shape.layers
        logits: Array = None
        for position, token in enumerate(prompt):
            logits = self._token(token, position, cache)
        output: list[int] = []
        while True:
            output.append(int(logits.argmax()))
            if len(output) == count:
                return output
            logits = self._token(output[-1], len(prompt) + len(output) - 1, cache)

    def _token(self, token: int, position: int, cache: list[tuple[Array, Array] | None]) -> Array:
        x = self._weight("model.embed_tokens")[token]
        for layer in range(self._shape.layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            x = x + self._attend(normed, prefix + "self_attn.", layer, position, cache)
            normed = self._norm(x, prefix + "post_attention_layernorm")
            gate = self._weight(prefix + "mlp.gate_proj") @ normed
            up = self._weight(prefix + "mlp.up_proj") @ normed
            x = x + self._weight(prefix + "mlp.down_proj") @ (gate / (1 + self._xp.exp(-gate)) * up)
        return self._weight(self._head) @ self._norm(x, "model.norm")

    def _attend(
        self, x: Array, prefix: str, layer: int, position: int, cache: list[tuple[Array, Array] | None]
    ) -> Array:
        xp, shape = self._xp, self._shape
        query = self._rotated((self._weight(prefix + "q_proj") @ x).reshape(shape.heads, -1), position)
        key = self._rotated((self._weight(prefix + "k_proj") @ x).reshape(shape.kv_heads, -1), position)[None]
        value = (self._weight(prefix + "v_proj") @ x).reshape(1, shape.kv_heads, -1)
        earlier = cache[layer]
        if earlier is not None:
            key, value = xp.concatenate([earlier[0], key]), xp.concatenate([earlier[1], value])
        cache[layer] = key, value
        keys, values = key[:, self._groups], value[:, self._groups]  # [length, heads, dim]
        scores = (keys * query).sum(-1) / shape.head_dim**0.5
        numerators = xp.exp(scores - xp.amax(scores, 0))
        mixed = (numerators[..., None] * values).sum(0) / numerators.sum(0)[:, None]
        return self._weight(prefix + "o_proj") @ mixed.reshape(-1)

    def _norm(self, x: Array, name: str) -> Array:
        return x / ((x * x).sum() / len(x) + self._shape.norm_eps) ** 0.5 * self._weight(name)

    def _rotated(self, heads: Array, position: int) -> Array:
        half = self._shape.head_dim // 2
        cosine, sine = self._turn[0][position], self._turn[1][position]
        low, high = heads[:, :half], heads[:, half:]
        return self._xp.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1)

    def _weight(self, name: str) -> Array:
        return self._weights[f"{name}.weight"]


def _single(values: Any) -> Values:
    single: Values = values.astype("float32")
    return single
