"""A dense Llama over paged K/V: one fused `forward(items)` per step, in exact or in floating-point numbers.

`exact` runs in fixed point, so that a result bit can't depend on batch, chunking, block size, threads or
library (`fixed` says why); it has the same source for numpy and torch. `fast` is bfloat16 or float32 in
torch, with Triton kernels on a GPU. Weights are made by an integer hash or read from safetensors.
Importing this package needs neither numpy nor torch; its modules need the first, `torch_*` the second.
"""


class ModelError(ValueError):
    """A model that can't be built as asked; the message says what to change."""
