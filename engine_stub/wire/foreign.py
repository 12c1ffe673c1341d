"""What tells that the gateway's group speaks the other family's protocol: only asked about what can't be decoded."""

from typing import Any

import msgspec

_TOKENSPEED_TAG = "TokenizedGenerateReqInput"
_VLLM_REQUIRED = 9


def is_tokenspeed_add(payload: bytes) -> bool:
    """Whether it is an array that begins with the name of TokenSpeed's request."""
    fields = _array(payload)
    return bool(fields) and fields[0] == _TOKENSPEED_TAG


def is_vllm_add(payload: bytes) -> bool:
    """Whether it is an array as long as vLLM's request at least: id, prompt, features, and a map of sampling parameters."""
    fields = _array(payload)
    return (
        len(fields) >= _VLLM_REQUIRED
        and isinstance(fields[0], str)
        and isinstance(fields[1], list | None)
        and isinstance(fields[3], dict | None)
        and isinstance(fields[5], float | int)
    )


def foreign(family: str) -> str:
    """What to say of such a request."""
    return (
        f"received a request of {family}: the gateway's group speaks another protocol than these ranks, see --protocol"
    )


def _array(payload: bytes) -> list[Any]:
    try:
        decoded = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return decoded if isinstance(decoded, list) else []
