"""What a model is made of, from the configuration or from the `config.json` beside pretrained weights.

Format of `config.json`: the public Llama layout of Hugging Face's `LlamaConfig` (keys such as
`num_key_value_heads`); RoPE scaling of kind `llama3`, as published with Llama 3.1.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine_stub.config import LLAMA_8B, Architecture, Model
from engine_stub.model import ModelError

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures whose layers are exactly a dense Llama's. Mistral counts without its sliding window."""
NAMED = {
    "8b": LLAMA_8B,
    "small": Architecture(layers=8, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=688),
    "tiny": Architecture(),
}
"""Shapes that the benchmarks and the self-test know by name."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Stretches slow rotary frequencies for texts longer than `original_positions` (kind `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions in elements. `heads` query heads share `kv_heads` K/V heads in equal groups."""

    vocab_size: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all K (or V) heads."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Number of weights."""
        total = 0
        for _, dimensions in self.tensors():
            count = 1
            for size in dimensions:
                count *= size
            total += count
        return total

    def kv_elements(self) -> int:
        """Elements of K and V of one position over all layers."""
        return 2 * self.layers * self.kv_width

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and dimensions of all weights; a matrix is `[out, in]`, as in the published files."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (self.hidden,)
            yield prefix + "self_attn.q_proj.weight", (self.query_width, self.hidden)
            yield prefix + "self_attn.k_proj.weight", (self.kv_width, self.hidden)
            yield prefix + "self_attn.v_proj.weight", (self.kv_width, self.hidden)
            yield prefix + "self_attn.o_proj.weight", (self.hidden, self.query_width)
            yield prefix + "post_attention_layernorm.weight", (self.hidden,)
            yield prefix + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield prefix + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield prefix + "mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tie_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden)


def of_architecture(architecture: Architecture, vocab_size: int) -> Shape:
    """The shape that a configuration describes."""
    return Shape(
        vocab_size=vocab_size,
        layers=architecture.layers,
        hidden=architecture.hidden,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        intermediate=architecture.intermediate,
        rope_theta=architecture.rope_theta,
        norm_eps=architecture.norm_eps,
        tie_embeddings=architecture.tie_embeddings,
    )


def of_model(model: Model) -> Shape:
    """The shape of the configured model; reads `config.json` when there is a path. Raises `ModelError`."""
    if model.path is None:
        return of_architecture(model.architecture or NAMED["tiny"], model.vocab_size)
    shape = of_directory(Path(model.path))
    if shape.vocab_size != model.vocab_size:
        raise ModelError(
            f"{model.path}: the weights know {shape.vocab_size} token ids, the configuration says "
            f"{model.vocab_size}: set model.vocab_size to {shape.vocab_size}"
        )
    return shape


def of_directory(directory: Path) -> Shape:
    """The shape of pretrained weights; raises `ModelError` for what this model can't run exactly."""
    path = directory / "config.json"
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; pretrained weights need a Llama config.json") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: {error}") from error
    try:
        return _of_config(raw)
    except (KeyError, TypeError, ValueError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: {what}") from error


def _of_config(raw: dict[str, Any]) -> Shape:
    kinds = raw.get("architectures") or ["LlamaForCausalLM"]
    if not set(kinds) <= set(SUPPORTED):
        raise ModelError(f"architectures {kinds} are not a dense Llama; supported: {', '.join(SUPPORTED)}")
    refused = {
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "sliding_window": raw.get("sliding_window"),
        "quantization_config": raw.get("quantization_config"),
    }
    for key, value in refused.items():
        if value:
            raise ModelError(f"{key} = {value!r} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported: silu only")
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    # Newer files keep all rotary settings in one mapping.
    rope = {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_parameters") or raw.get("rope_scaling") or {}),
    }
    shape = Shape(
        vocab_size=int(raw["vocab_size"]),
        layers=int(raw["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate=int(raw["intermediate_size"]),
        rope_theta=float(rope["rope_theta"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope_scaling=_rope_scaling(rope, raw),
    )
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise ModelError(f"heads {heads}, kv heads {shape.kv_heads}, head dim {shape.head_dim} don't fit together")
    return shape


def _rope_scaling(rope: dict[str, Any], raw: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope scaling of kind {kind!r} is not supported: default or llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )
