"""What was made of bytes that clients send again and again, by these bytes. Bounded in number and size."""

from typing import TypeVar

MAX_ENTRIES = 1024
MAX_KEY_BYTES = 512

ValueT = TypeVar("ValueT")


def keep(memo: dict[bytes, ValueT], key: bytes, value: ValueT) -> None:
    """Remember a value; when there are too many, what clients really repeat is back after one of each."""
    if len(key) > MAX_KEY_BYTES:
        return
    if len(memo) >= MAX_ENTRIES:
        memo.clear()
    memo[key] = value
