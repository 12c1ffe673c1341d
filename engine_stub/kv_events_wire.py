"""vLLM's KV event messages: what they look like on the PUB socket.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0 for each incarnation) and
payload. The payload is the msgpack array `[ts, events, data_parallel_rank]`, `ts` in Unix seconds. Since
0.24 an event is a map with its class name under `type` (vllm-project/vllm#42892), before that an array
with the name first; both leave out trailing defaults. A block hash is an integer of 64 bits (the last
8 bytes of the digest) or the raw digest.

A replay request is `[identity, b"", first sequence number]` on the ROUTER socket; the answer is one
message `[identity, b"", sequence number, payload]` per batch that is still kept, and one with the
number -1 and no payload at the end.
"""

from typing import Any, Literal

import msgspec

from engine_stub.scheduler import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MEDIUM = "GPU"
"""What vLLM calls the tier that its scheduler manages, on CPU too."""
_HASH_MASK = (1 << 64) - 1

HashForm = Literal["int", "bytes"]
EventForm = Literal["map", "array"]
WireHash = int | bytes


class EventEncoder:
    """Payloads of one rank. `block_size` is in tokens."""

    def __init__(self, *, block_size: int, rank: int, event_form: EventForm, hash_form: HashForm) -> None:
        self._block_size = block_size
        self._rank = rank
        self._is_map = event_form == "map"
        self._is_int = hash_form == "int"
        self._encode = msgspec.msgpack.Encoder().encode

    def payload(self, events: list[CacheEvent], unix_s: float) -> bytes:
        """One batch of events, in order."""
        return self._encode([unix_s, [self._event(event) for event in events], self._rank])

    def _event(self, event: CacheEvent) -> Any:
        fields: dict[str, Any]
        match event:
            case BlocksStored():
                fields = {
                    "type": "BlockStored",
                    "block_hashes": [self._hash(digest) for digest in event.hashes],
                    "parent_block_hash": None if event.parent is None else self._hash(event.parent),
                    "token_ids": event.token_ids,
                    "block_size": self._block_size,
                    "lora_id": None,
                    "medium": MEDIUM,
                    "lora_name": None,
                    "extra_keys": self._extra_keys(event),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            case BlocksRemoved():
                hashes = [self._hash(digest) for digest in event.hashes]
                fields = {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": 0}
            case AllBlocksCleared():
                fields = {"type": "AllBlocksCleared"}
        return fields if self._is_map else list(fields.values())

    @staticmethod
    def _extra_keys(event: BlocksStored) -> list[tuple[str] | None]:
        """Per block what else its hash covers: the salt, in a text's first block."""
        keys: list[tuple[str] | None] = [None] * len(event.hashes)
        if event.salt and event.parent is None:
            keys[0] = (event.salt,)
        return keys

    def _hash(self, digest: bytes) -> WireHash:
        return int.from_bytes(digest, "big") & _HASH_MASK if self._is_int else digest


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The address of one rank: its index is added to a TCP port, and to other names as a suffix.

    A port of `*` or 0 stays as it is: the system gives every rank its own.
    """
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    if port in ("*", "0"):
        return f"{host}:*"
    if not port.isdigit():
        raise ValueError(f"KV event endpoint {endpoint} has no port: use tcp://HOST:PORT")
    return f"{host}:{int(port) + rank}"
