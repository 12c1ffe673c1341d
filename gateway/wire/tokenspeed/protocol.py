"""The TokenSpeed family behind the `EngineProtocol` seam."""

from collections.abc import Sequence

from gateway.types import EngineMessage, EngineRequest, Protocol
from gateway.wire.common import encode_abort, open_message
from gateway.wire.protocol import CoordinatorProtocol, Frame
from gateway.wire.tokenspeed.outputs import decode_batch
from gateway.wire.tokenspeed.requests import encode_add


class TokenSpeedProtocol:
    """Codec for ranks started with `ts serve --headless`. Stateless; safe to share."""

    name: Protocol = "tokenspeed"
    coordinator: CoordinatorProtocol | None = None

    def may_be(self, engine_version: str) -> bool:
        """TokenSpeed announces `tokenspeed-<version>`."""
        return not engine_version or engine_version.startswith("tokenspeed")

    def encode_add(self, request: EngineRequest) -> list[bytes]:
        """Frames `[type, payload]`; the payload is the 11-element prefix of `TokenizedGenerateReqInput`."""
        return encode_add(request)

    def encode_abort(self, wire_ids: Sequence[str]) -> list[bytes]:
        """Frames `[type, payload]`; the rank answers nothing and remembers unknown ids for a while."""
        return encode_abort(wire_ids)

    def decode_output(self, frames: Sequence[Frame]) -> EngineMessage:
        """Decode one message of the output socket; aux frames don't occur in this family and are ignored."""
        payload = open_message(frames)
        return decode_batch(payload) if isinstance(payload, bytes) else payload
