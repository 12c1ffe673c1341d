"""The vLLM family behind the `EngineProtocol` seam."""

from collections.abc import Sequence

from gateway.types import EngineMessage, EngineRequest, Protocol
from gateway.wire.common import encode_abort, open_message
from gateway.wire.protocol import CoordinatorProtocol, Frame
from gateway.wire.vllm.coordinator import VllmCoordinator
from gateway.wire.vllm.outputs import decode_outputs, decode_plain
from gateway.wire.vllm.requests import encode_add


class VllmProtocol:
    """Codec for ranks started with `vllm serve --headless`, 0.24 and later. Immutable; safe to share.

    `client_index` names the output socket (position in INIT's address list) that a rank answers on;
    a rank that has no such socket falls silent, so it must match what INIT said.
    """

    name: Protocol = "vllm"
    coordinator: CoordinatorProtocol | None = VllmCoordinator()

    def __init__(self, *, client_index: int = 0) -> None:
        self._client_index = client_index

    def may_be(self, engine_version: str) -> bool:
        """A bare version number, as vLLM announces it; TokenSpeed, in the same field, puts its name before it."""
        return not engine_version.startswith("tokenspeed")

    def encode_add(self, request: EngineRequest) -> list[bytes]:
        """Frames `[type, payload]`; the payload is the 14-element prefix of `EngineCoreRequest`."""
        return encode_add(request, self._client_index)

    def encode_abort(self, wire_ids: Sequence[str]) -> list[bytes]:
        """Frames `[type, payload]`; the rank answers nothing, unknown ids are ignored."""
        return encode_abort(wire_ids)

    def decode_output(self, frames: Sequence[Frame]) -> EngineMessage:
        """Decode one message of the output socket: payload, then the aux frames its tensors point at."""
        first = frames[0] if len(frames) == 1 else None
        if type(first) is bytes and (plain := decode_plain(first)) is not None:
            return plain
        payload = open_message(frames)
        return decode_outputs(payload, frames) if isinstance(payload, bytes) else payload
