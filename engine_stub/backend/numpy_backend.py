"""Backend `numpy`: the exact model on the CPU; needs numpy only."""

from functools import lru_cache

from engine_stub.config import Model, StubConfig
from engine_stub.model import ModelError, weights
from engine_stub.model.arrays import NumpyArrays
from engine_stub.model.backend import KernelBackend, exact_backend
from engine_stub.model.exact import ExactWeights, load


@lru_cache(maxsize=2)
def shared_weights(model: Model) -> ExactWeights:
    """The weights of a configured model; ranks of one process share them, nobody writes them."""
    shape, source = weights.of_model(model)
    return load(shape, source, NumpyArrays())


def create(config: StubConfig) -> KernelBackend:
    """The backend for one rank; raises `ModelError`."""
    if config.model.numerics != "exact":
        raise ModelError("numerics: fast needs torch: use backend torch, or numerics: exact")
    return exact_backend("numpy", config, shared_weights(config.model))
