"""Backends by name; `create` says what is missing when one can't be had."""

from engine_stub.backend import Backend
from engine_stub.backend.synthetic import SyntheticBackend
from engine_stub.config import StubConfig

AVAILABLE = ("synthetic",)
PLANNED = ("numpy", "torch")


class BackendError(ValueError):
    """A backend that can't be created; the message says why and what there is."""


def create(name: str, config: StubConfig) -> Backend:
    """The backend `name` for one rank; raises `BackendError`."""
    if name == "synthetic":
        model = config.model
        return SyntheticBackend(vocab_size=model.vocab_size, excluded=model.never_emitted, step_time=config.step_time)
    what = "is not part of this version" if name in PLANNED else "is not known"
    raise BackendError(f"backend '{name}' {what}; available: {', '.join(AVAILABLE)}")
