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

    def encode_add(self, request: EngineRequest) -> list[bytes]:
        """Frames `[type, payload]` that submit one request."""
        ...

    def encode_abort(self, wire_ids: Sequence[str]) -> list[bytes]:
        """Frames `[type, payload]` that abort requests; unknown ids are harmless."""
        ...

    def decode_output(self, frames: Sequence[Frame]) -> EngineMessage:
        """Decode one message of a rank's output socket (payload frame first, then aux frames)."""
        ...
