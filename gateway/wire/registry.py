"""The codecs of the engine families by their names in the configuration."""

from gateway.types import FAMILIES
from gateway.wire.protocol import EngineProtocol
from gateway.wire.tokenspeed import TokenSpeedProtocol
from gateway.wire.vllm import VllmProtocol


def protocol_for(name: str, *, client_index: int = 0) -> EngineProtocol:
    """Return the codec of an engine family. Raises `ValueError` for a name that isn't one.

    `client_index` matters to families that can answer several gateway processes (vLLM).
    """
    if name == "tokenspeed":
        return TokenSpeedProtocol()
    if name == "vllm":
        return VllmProtocol(client_index=client_index)
    raise ValueError(f"unknown engine protocol {name!r}: one of {', '.join(FAMILIES)}")
