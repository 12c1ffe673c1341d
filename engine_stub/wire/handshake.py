"""The handshake maps that both families share: HELLO and READY up, INIT down. All bodies are msgpack maps."""

from typing import Any

import msgspec


class Status(msgspec.Struct):
    """HELLO or READY as TokenSpeed sends it."""

    status: str
    local: bool
    headless: bool
    parallel_config_hash: str | None = None


class BareStatus(msgspec.Struct):
    """HELLO or READY as vLLM sends it when the data-parallel size is 1."""

    status: str
    local: bool
    headless: bool


class Addresses(msgspec.Struct):
    """Where the gateway listens for this rank: one of each per front end; TokenSpeed uses the first ones."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class Init(msgspec.Struct):
    """The gateway's answer to HELLO; unknown keys are ignored."""

    addresses: Addresses
    parallel_config: dict[str, Any] = {}


class HandshakeError(Exception):
    """The gateway's answer can't be used, or none came in time."""


_decoder = msgspec.msgpack.Decoder(Init)


def decode_init(frames: list[bytes]) -> Addresses:
    """Addresses from an INIT message (its last frame); raises `HandshakeError`."""
    try:
        addresses = _decoder.decode(frames[-1]).addresses
    except (msgspec.MsgspecError, IndexError) as error:
        raise HandshakeError(f"INIT can't be decoded: {error}") from error
    if not addresses.inputs or not addresses.outputs:
        raise HandshakeError("INIT names no input or no output address: the gateway must send one of each")
    return addresses
