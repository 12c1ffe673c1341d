"""Backend `torch`: the exact model on CPU or CUDA, bit for bit the one of `numpy`; or `numerics: fast`."""

from functools import lru_cache

import torch

from engine_stub.backend import BackendInfo
from engine_stub.config import Model, StubConfig
from engine_stub.model import ModelError, torch_fast, weights
from engine_stub.model.backend import KernelBackend, exact_backend, recipe
from engine_stub.model.exact import ExactWeights
from engine_stub.model.exact import load as load_exact
from engine_stub.model.torch_arrays import TorchArrays

FAST_DTYPES = ("bfloat16", "float16", "float32")


@lru_cache(maxsize=2)
def shared_weights(model: Model) -> ExactWeights:
    """Exact weights on the model's device; ranks of one process share them, nobody writes them."""
    shape, source = weights.of_model(model)
    return load_exact(shape, source, TorchArrays(model.device))


@lru_cache(maxsize=2)
def shared_fast_weights(model: Model) -> torch_fast.FastWeights:
    """Floating-point weights, shared likewise."""
    shape, source = weights.of_model(model)
    return torch_fast.load(shape, source, model.device, model.dtype)


def create(config: StubConfig) -> KernelBackend:
    """The backend for one rank; raises `ModelError`."""
    check_device(config.model.device)
    if config.model.numerics == "fast":
        return fast_backend(config, is_invariant=config.model.batch_invariant)
    return exact_backend("torch", config, shared_weights(config.model))


def fast_backend(config: StubConfig, *, is_invariant: bool = False) -> KernelBackend:
    """The fast model with a K/V pool as the scheduler is configured; raises `ModelError`."""
    model, scheduler = config.model, config.scheduler
    if model.dtype not in FAST_DTYPES:
        raise ModelError(f"model.dtype '{model.dtype}': numerics fast has {', '.join(FAST_DTYPES)}")
    loaded = shared_fast_weights(model)
    ops = torch_fast.choose_ops(loaded.shape, model.device, is_invariant=is_invariant)
    fast = torch_fast.FastModel(
        loaded,
        ops,
        blocks=scheduler.total_blocks,
        block_size=scheduler.block_size,
        positions=config.max_model_len,
    )
    info = BackendInfo(
        name="torch",
        numerics="fast",
        batch_invariant=is_invariant,
        kv_bytes_per_token=loaded.shape.kv_elements() * loaded.embedding.element_size(),
        weight_bytes=loaded.nbytes,
        recipe=recipe(
            loaded.shape,
            loaded.digest,
            model.never_emitted,
            numerics="fast",
            dtype=model.dtype,
            kernels=ops.name,
            torch=str(torch.__version__),
            device=_device_name(model.device),
        ),
    )
    return KernelBackend(info, fast, model.never_emitted)


def check_device(device: str) -> None:
    """Raise `ModelError` for a device that torch doesn't have here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device '{device}': {str(error).splitlines()[0]}") from error


def _device_name(device: str) -> str:
    """The kind of chip: floating-point results depend on it."""
    kind = torch.device(device).type
    return str(torch.cuda.get_device_name(device)) if kind == "cuda" else kind
