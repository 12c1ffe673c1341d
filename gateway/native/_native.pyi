"""What `gateway.native.compiled` has. Raises TypeError for arguments that are not what is named here."""

from collections.abc import Callable, Iterable
from typing import Any, Self

from gateway.native import DecodedRows
from gateway.types import FinishReason

class Intake:
    """Appends rows, see `gateway.core.rows`. Made for these classes; TypeError for one that lacks a slot."""

    def __new__(cls, attempt: type, sequence: type, record: type, max_pending: int, /) -> Self: ...
    def append(
        self,
        live: dict[str, Any],
        ids: Any,
        token_ids: Any,
        finish: Any,
        completion: Any,
        logprobs: Any,
        dirty: list[Any],
        other: Callable[[int, Any], int],
        /,
    ) -> int: ...

class Outlet:
    """Flushes sequences, see `gateway.edges.flushing`. Made for these classes; TypeError for one that lacks a slot."""

    def __new__(cls, sequence: type, encoder: type, stream: type, outbound: type, /) -> Self: ...
    def flush(
        self, items: list[Any], other: Callable[[Any], None], broken: Callable[[Any, Exception], None], /
    ) -> None: ...

def decode_vllm(payload: bytes, finish_reasons: tuple[FinishReason, ...], /) -> DecodedRows | None:
    """The parts of a message with ordinary rows only, else None.

    `finish_reasons` are those of a row that goes on and then of the numbers 0 to 4.
    """

def pack_varints(values: Iterable[int], /) -> bytes:
    """One after the other. ValueError for what is no int from 0 to 2^62."""
