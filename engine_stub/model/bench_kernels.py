"""Single operations of one layer, timed with the shapes of a decode step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_stub.model import layout
from engine_stub.model.bench import BLOCK_SIZE, KernelFigure, best_s, decode_items
from engine_stub.model.exact import ExactModel, place
from engine_stub.model.shape import Shape

Array = Any


def of_exact(model: ExactModel, batch: int, context: int) -> list[KernelFigure]:
    """Operations of the exact model."""
    shape, xp, layer = model.shape, model.arrays, model.weights.layers[0]
    x = xp.put(_units((batch, shape.hidden)))
    query = xp.put(_units((batch, shape.heads, shape.head_dim)))
    made = layout.build(decode_items(batch, context), BLOCK_SIZE)
    groups = [placed for group in made.groups for placed in place(group, shape, xp)]
    calls: dict[str, Callable[[], object]] = {
        "norm": lambda: xp.get(model.norm(x, layer.attention_norm)),
        "linear": lambda: xp.get(xp.matmul(x, layer.gate_up)),
        "attention": lambda: xp.get(model.attend(0, query, groups)),
        "feed_forward": lambda: xp.get(model.feed_forward(x, layer)),
    }
    return _figures(shape, 8, batch, context, calls)


def of_fast(model: Any, batch: int, context: int) -> list[KernelFigure]:
    """Operations of the fast model (`torch_fast.FastModel`)."""
    import torch  # noqa: PLC0415 - only for a model that needs it

    from engine_stub.model.torch_steps import of_items  # noqa: PLC0415

    shape, ops, layer = model.shape, model.ops, model.weights.layers[0]
    dtype = model.weights.embedding.dtype

    def values(*dimensions: int) -> Array:
        return torch.randn(dimensions, device=model.device).to(dtype)

    x, query = values(batch, shape.hidden), values(batch, shape.heads, shape.head_dim)
    gate_up = values(batch, 2 * shape.intermediate)
    step = of_items(decode_items(batch, context), BLOCK_SIZE, ops.tile_positions, model.device)
    keys, values_ = model.layer_cache(0)

    def waiting(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            call()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)

        return run

    calls: dict[str, Callable[[], object]] = {
        "norm": waiting(lambda: ops.add_norm(x, x, layer.attention_norm)),
        "linear": waiting(lambda: ops.linear(x, layer.gate_up)),
        "attention": waiting(lambda: ops.attend(query, keys, values_, step)),
        "swiglu": waiting(lambda: ops.swiglu(gate_up)),
    }
    return _figures(shape, dtype.itemsize, batch, context, calls)


def _figures(
    shape: Shape, itemsize: int, batch: int, context: int, calls: dict[str, Callable[[], object]]
) -> list[KernelFigure]:
    linear = 2 * shape.hidden * shape.intermediate
    flops = {"linear": 2 * batch * linear, "feed_forward": 2 * batch * (linear + shape.hidden * shape.intermediate)}
    moved = {
        "linear": linear * itemsize,
        "attention": 2 * batch * (context + 1) * shape.kv_width * itemsize,
    }
    figures = []
    for name, call in calls.items():
        duration = best_s(call)
        figures.append(
            KernelFigure(
                name=name,
                batch=batch,
                call_us=1e6 * duration,
                gflops=flops[name] / duration / 1e9 if name in flops else None,
                gb_per_s=moved[name] / duration / 1e9 if name in moved else None,
            )
        )
    return figures


def _units(dimensions: tuple[int, ...]) -> Array:
    """Activations around 1, in units."""
    count = int(np.prod(dimensions))
    return ((np.arange(count) * 2654435761 % 8192) - 4096).astype(np.float64).reshape(dimensions)
