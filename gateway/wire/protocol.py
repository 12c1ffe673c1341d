"""The one seam between the gateway and an engine family's wire format.

To add an engine protocol: one folder beside `tokenspeed/` and `vllm/` that implements
`EngineProtocol`, one line in `registry.py`, and its properties in `gateway.types.FAMILIES`.
"""

from collections.abc import Sequence
from typing import Protocol as TypingProtocol

from gateway.types import EngineMessage, EngineRequest, Protocol

Frame = bytes | memoryview


class EngineProtocol(TypingProtocol):
    """Encodes what goes to a rank and decodes what comes back. Pure and stateless.

    Encoders return the frames after the ROUTER identity. `decode_output` never raises on any
    input: whatever a peer sends becomes an `EngineMessage`.
    """

    name: Protocol
    coordinator: "CoordinatorProtocol | None"
    """None where the family's ranks report to nobody but through their batches."""

    def may_be(self, engine_version: str) -> bool:
        """Whether an engine that calls its version this in the handshake may be of the family. Empty: it said nothing."""
        ...

    def encode_add(self, request: EngineRequest) -> list[bytes]:
        """Frames `[type, payload]` that submit one request."""
        ...

    def encode_abort(self, wire_ids: Sequence[str]) -> list[bytes]:
        """Frames `[type, payload]` that abort requests; unknown ids are harmless."""
        ...

    def decode_output(self, frames: Sequence[Frame]) -> EngineMessage:
        """Decode one message of a rank's output socket (payload frame first, then aux frames)."""
        ...


class CoordinatorProtocol(TypingProtocol):
    """What a coordinator of a group's ranks hears and says. Pure and stateless."""

    ready: bytes
    """The answer to a subscription: the rank waits for it."""

    def is_subscription(self, payload: Frame) -> bool:
        """Whether a message on the published socket asks for what is published."""
        ...

    def encode_start_wave(self, wave: int) -> list[bytes]:
        """Frames that make every rank of a lockstep group step, unless it is past this wave."""
        ...

    def decode_report(self, frames: Sequence[Frame]) -> EngineMessage:
        """Decode what a rank pushed: a batch without rows that holds its load, wave control, or noise."""
        ...
