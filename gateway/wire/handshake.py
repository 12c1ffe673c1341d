"""How a rank registers: HELLO / INIT / READY and the ready response, the same in both families.

All four are msgpack maps keyed by name, so unknown keys are ignored and order means nothing.
Sequence on the wire: HELLO (rank), INIT (gateway), then READY on the handshake socket and the ready
response on the input socket in either order (vLLM sends the response first, TokenSpeed READY first).
Every decoder here raises `WireError` and nothing else, whatever the bytes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from gateway.types import RankInfo
from gateway.wire.common import MALFORMED, Opaque, as_count
from gateway.wire.protocol import Frame

IDENTITY_BYTES: Final = 2
MAX_HANDSHAKE_BYTES: Final = 1 << 20
_MAX_ERROR_CHARS: Final = 200  # a decoder's message may quote what the peer sent


class WireError(ValueError):
    """A handshake message that can't be used; the text says which part and why."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says on the handshake socket, before (`HELLO`) and after (`READY`) it loaded its model.

    `parallel_config_hash` comes with READY from lockstep vLLM groups only.
    """

    status: Literal["HELLO", "READY"]
    local: bool = False
    headless: bool = False
    parallel_config_hash: str | None = None


class _Addresses(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Sequence[str]
    outputs: Sequence[str]
    coordinator_input: str | None
    coordinator_output: str | None
    frontend_stats_publish_address: str | None = None


class _Init(msgspec.Struct, frozen=True, kw_only=True):
    addresses: _Addresses
    parallel_config: Mapping[str, object] = {}


class _ReadyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The named fields that the gateway reads; `prefix_granularity` is TokenSpeed's newer `block_size`."""

    max_model_len: Opaque = None
    num_gpu_blocks: Opaque = None
    block_size: Opaque = None
    prefix_granularity: Opaque = None
    kv_cache_size_tokens: Opaque = None
    max_num_seqs: Opaque = None
    max_num_batched_tokens: Opaque = None
    data_parallel_size: Opaque = None
    data_parallel_rank: Opaque = None
    vllm_version: Opaque = None
    dtype: Opaque = None
    instance_id: Opaque = None


_HELLO = msgspec.msgpack.Decoder(Hello)
_READY_RESPONSE = msgspec.msgpack.Decoder(_ReadyResponse)


def identity_of(index: int) -> bytes:
    """Return the ROUTER identity of an engine index: 2 bytes, little-endian."""
    if not 0 <= index < 1 << (8 * IDENTITY_BYTES):
        raise ValueError(f"an engine index is 0..65535, not {index}")
    return index.to_bytes(IDENTITY_BYTES, "little")


def index_of(identity: Frame) -> int | None:
    """Return the engine index of a ROUTER identity; None for anything that isn't 2 bytes."""
    return int.from_bytes(identity, "little") if len(identity) == IDENTITY_BYTES else None


def decode_hello(frames: Sequence[Frame]) -> Hello:
    """Decode HELLO or READY from the frames after the identity (the last one counts)."""
    payload = _payload("handshake message", frames[-1] if frames else b"")
    try:
        return _HELLO.decode(payload)
    except MALFORMED as error:
        raise _unreadable("handshake message", error) from None


def encode_init(
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    coordinator_input: str | None = None,
    coordinator_output: str | None = None,
    parallel_config: Mapping[str, object] = MappingProxyType({}),
) -> bytes:
    """Encode the answer to HELLO: where this rank is to connect.

    Ranks use the first address of each list. The coordinator addresses exist for vLLM only; None
    leaves them out of its start-up. `parallel_config` is set in the rank's own configuration: it is
    empty where the ranks are independent, and tells those of a lockstep group where they meet.
    """
    addresses = _Addresses(
        inputs=inputs, outputs=outputs, coordinator_input=coordinator_input, coordinator_output=coordinator_output
    )
    return msgspec.msgpack.encode(_Init(addresses=addresses, parallel_config=dict(parallel_config)))


def meeting_point(host: str, ports: Sequence[int], ranks: int) -> dict[str, object]:
    """Return the `parallel_config` of a lockstep group (vLLM): its first rank listens on `ports` of `host`.

    The first port is that of the data-parallel group, the others are for what a rank opens later. A store of the
    front end's own, from which recent ranks could take the ports, is declined with port 0.
    """
    return {
        "data_parallel_master_ip": host,
        "data_parallel_master_port": ports[0],
        "_data_parallel_master_port_list": list(ports[1:]),
        "_coord_store_port": 0,
        "data_parallel_size": ranks,
    }


def decode_ready_response(payload: Frame) -> RankInfo:
    """Decode the registration on the input socket. Raises `WireError` without a usable `max_model_len`.

    Other fields are None when absent, nil or of a form not known here: a rank must not be refused
    over something the gateway can do without. `max_num_batched_tokens` -1 means "no limit" on older
    TokenSpeed. `kv_capacity_tokens` falls back to blocks x block size where the rank gives no total.
    """
    try:
        ready = _READY_RESPONSE.decode(_payload("ready response", payload))
    except MALFORMED as error:
        raise _unreadable("ready response", error) from None
    max_model_len = as_count(ready.max_model_len)
    if not max_model_len:
        raise WireError("ready response: max_model_len is missing or isn't a positive integer")
    num_gpu_blocks = as_count(ready.num_gpu_blocks)
    block_size = _first(as_count(ready.block_size), as_count(ready.prefix_granularity))
    return RankInfo(
        max_model_len=max_model_len,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        kv_capacity_tokens=_first(_whole(ready.kv_cache_size_tokens), _product(num_gpu_blocks, block_size)),
        max_num_seqs=as_count(ready.max_num_seqs),
        max_num_batched_tokens=as_count(ready.max_num_batched_tokens),
        data_parallel_size=as_count(ready.data_parallel_size) or 1,
        data_parallel_rank=as_count(ready.data_parallel_rank),
        engine_version=_text(ready.vllm_version),
        dtype=_text(ready.dtype),
        instance_id=_text(ready.instance_id),
    )


def _payload(what: str, frame: Frame) -> Frame:
    if not len(frame):
        raise WireError(f"{what}: empty")
    if len(frame) > MAX_HANDSHAKE_BYTES:
        raise WireError(f"{what}: {len(frame)} bytes, at most {MAX_HANDSHAKE_BYTES} are read")
    return frame


def _unreadable(what: str, error: Exception) -> WireError:
    return WireError(f"{what}: {str(error)[:_MAX_ERROR_CHARS]}")


def _first(value: int | None, fallback: int | None) -> int | None:
    return fallback if value is None else value


def _product(left: int | None, right: int | None) -> int | None:
    return left * right if left and right else None


def _whole(value: Opaque) -> int | None:
    """Return a non-negative integer of any size: a KV capacity isn't bound to 32 bits."""
    return value if type(value) is int and value >= 0 else None


def _text(value: Opaque) -> str:
    return value if isinstance(value, str) else ""
