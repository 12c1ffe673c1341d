"""The way of ordinary rows through the gateway, compiled. Optional: without it the same is done in Python.

Four walks over rows are written in C as well: from a vLLM message to columns (`decode_vllm`), from columns to outboxes
(`Intake`), from outboxes to frames (`Outlet`), from ids to packed varints (`pack_varints`). Each does what Python does with
a row that is nothing special, to the same objects, and hands every other row to Python. The Python is the reference: tests
hold one against the other.

Why: between two steps of the ranks the core sleeps, and whatever a row touches has left the caches by then. C can
ask for the next rows' memory while it works on this one. See docs/adr/0006-compiled-rows.md.

`compiled` is None where the module wasn't built (no compiler or no Python headers), or with RANKGATE_NATIVE=0. One that was
built and can't be loaded is an error.
"""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from gateway.types import FinishReason

if TYPE_CHECKING:
    from gateway.native._native import Intake, Outlet

DecodedRows = tuple[int, list[str], list[tuple[int, ...]], list[FinishReason], list[int | None] | None, bytes, float]
"""Engine index, ids, new tokens, finish reasons, tokens from the prefix cache (None without any), the statistics as they came
(msgpack, empty when there is no such field), the time (0.0 without one)."""


class Compiled(Protocol):
    """What the module has, see `_native.pyi`."""

    @property
    def Intake(self) -> "type[Intake]":  # noqa: N802 - a class
        """Appends rows."""
        ...

    @property
    def Outlet(self) -> "type[Outlet]":  # noqa: N802 - a class
        """Flushes sequences."""
        ...

    @property
    def decode_vllm(self) -> Callable[[bytes, tuple[FinishReason, ...]], DecodedRows | None]:
        """Decodes a message."""
        ...

    @property
    def pack_varints(self) -> Callable[[Iterable[int]], bytes]:
        """Packs ids."""
        ...


compiled: Compiled | None = None
if os.environ.get("RANKGATE_NATIVE") != "0":
    try:
        import gateway.native._native as _native  # noqa: PLR0402 - the other form has no ModuleNotFoundError
    except ModuleNotFoundError:
        pass
    else:
        compiled = _native
