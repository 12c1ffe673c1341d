"""Backends by name; `create` says what is missing when one can't be had."""

import importlib
import os

from engine_stub.backend import Backend
from engine_stub.backend.synthetic import SyntheticBackend
from engine_stub.config import LLAMA_8B, StubConfig
from engine_stub.model import ModelError
from engine_stub.recipe import PartialShardsError, check_whole

KERNELS = {"numpy": "pip install 'rankgate[numpy]'", "torch": "make setup-torch, or pip install 'rankgate[torch]'"}
"""Backends that run a model, and how to get what they need."""
AVAILABLE = ("synthetic", *KERNELS)


class BackendError(ValueError):
    """A backend that can't be created; the message says why and what there is."""


def create(name: str, config: StubConfig) -> Backend:
    """The backend `name` for one rank; raises `BackendError`, also for one that holds a part of the model only."""
    backend = _make(name, config)
    try:
        check_whole(backend.info)
    except PartialShardsError as error:
        raise BackendError(str(error)) from error
    return backend


def _make(name: str, config: StubConfig) -> Backend:
    if name == "synthetic":
        model = config.model
        return SyntheticBackend(
            vocab_size=model.vocab_size,
            excluded=model.never_emitted,
            step_time=config.step_time,
            kv_bytes_per_token=(model.architecture or LLAMA_8B).kv_bytes_per_token,
        )
    if name in KERNELS:
        return _make_kernels(name, config)
    raise BackendError(f"backend '{name}' is not known; available: {', '.join(AVAILABLE)}")


def _make_kernels(name: str, config: StubConfig) -> Backend:
    # A rank shares its host with other ranks, whose threads would wait for each other inside small products.
    # Takes effect when numpy wasn't imported before; no bit of an exact result depends on it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        module = importlib.import_module(f"engine_stub.backend.{name}_backend")
    except ImportError as error:
        raise BackendError(f"backend '{name}' needs {error.name}, which isn't installed: {KERNELS[name]}") from error
    try:
        backend: Backend = module.create(config)
    except ModelError as error:
        raise BackendError(f"backend '{name}': {error}") from error
    return backend
