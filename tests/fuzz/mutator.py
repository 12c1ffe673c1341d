"""Damages frames, reproducibly: bytes, msgpack trees, protobuf fields and text. Everything comes from one seed.

A mutator never makes a frame of more than `MAX_FRAME_BYTES`: what is large is for tests of limits, here it would only
make fewer frames a second.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

MAX_FRAME_BYTES = 16 * 1024
_DEPTHS = (3, 40, 1_100, 6_000)
_INTERESTING_BYTES = bytes((0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC2, 0xC4, 0xC7, 0xCA, 0xCF, 0xD9, 0xDD, 0xFF))
# Headers that promise up to 2^32 - 1 elements or bytes: array, map, str, bin, ext.
_LENGTH_BOMBS = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xc9\xff\xff\xff\xff\x01", b"\xdd\x00\x10\x00\x00", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xda\xff\xff"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 127, 128, -33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1),
    *(-(2**31), -(2**63), 0.0, -0.0, 1.0, 1.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "a", "stop", "length", "BatchTokenIDOutSlim", "num_cached_tokens", "ENGINE_CORE_DEAD", "\x00", "\U0001f600"),
    *(b"", b"\x00\x01\x02\x03", [], [[]], {}, {"num_cached_tokens": 3}, {1: 2}, [None], ["<i4", [1, 1], 1]),
    *(msgspec.msgpack.Ext(1, b"\x80\x04N."), msgspec.msgpack.Ext(2, b""), msgspec.msgpack.Ext(-1, b"\x00" * 4)),
)

Frame = list[bytes]


class Mutator:
    """One stream of damage. `others` are frames to take pieces from."""

    def __init__(self, seed: str, others: Sequence[bytes] = ()) -> None:
        self.source = random.Random(seed)
        self._others = [other for other in others if other] or [b"\x00"]
        self._byte_steps: tuple[Callable[[bytearray], None], ...] = (
            *(self._set, self._set, self._flip, self._flip, self._cut, self._drop, self._insert, self._repeat),
            *(self._splice, self._bomb, self._number),
        )

    def frames(self, frames: Sequence[bytes]) -> Frame:
        """A damaged copy of a multipart message; now and then whole frames come, go or change places."""
        source = self.source
        result = list(frames)
        at = 0 if source.random() < 0.7 else source.randrange(len(result))
        result[at] = self.mutate(result[at])
        if source.random() < 0.04:
            match source.randrange(4):
                case 0:
                    result.insert(source.randrange(len(result) + 1), source.choice(self._others))
                case 1:
                    del result[source.randrange(len(result))]
                case 2:
                    source.shuffle(result)
                case _:
                    result.append(source.randbytes(source.randrange(12)))
        return result

    def mutate(self, data: bytes) -> bytes:
        """Damage one frame, as a tree of msgpack where it is one."""
        if self.source.random() < 0.5:
            try:
                return self.tree(data)[:MAX_FRAME_BYTES]
            except (ValueError, TypeError, RecursionError, msgspec.MsgspecError):
                pass  # no msgpack, or none any more
        return self.raw(data)

    # ---- bytes -------------------------------------------------------------------------------

    def raw(self, data: bytes, steps: int = 3) -> bytes:
        """One to `steps` changes of bytes."""
        whole = bytearray(data)
        source = self.source
        for _ in range(source.randint(1, steps)):
            if not whole:
                whole += source.choice(self._others)
            source.choice(self._byte_steps)(whole)
        return bytes(whole[:MAX_FRAME_BYTES])

    def _at(self, data: bytearray) -> int:
        return self.source.randrange(len(data))

    def _set(self, data: bytearray) -> None:
        data[self._at(data)] = self.source.choice(_INTERESTING_BYTES)

    def _flip(self, data: bytearray) -> None:
        data[self._at(data)] ^= 1 << self.source.randrange(8)

    def _number(self, data: bytearray) -> None:
        at = self._at(data)
        data[at] = (data[at] + self.source.choice((-2, -1, 1, 2, 16))) % 256

    def _cut(self, data: bytearray) -> None:
        del data[self._at(data) :]

    def _drop(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self.source.randint(1, 8)]

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self.source.randbytes(self.source.randint(1, 6))

    def _repeat(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = data[at : at + self.source.randint(1, 24)] * self.source.choice((1, 1, 2, 16))

    def _splice(self, data: bytearray) -> None:
        other = self.source.choice(self._others)
        data[self._at(data) :] = other[self.source.randrange(len(other)) :]

    def _bomb(self, data: bytearray) -> None:
        at = self._at(data)
        if self.source.random() < 0.05:
            data[at:at] = self.source.choice((b"\x91", b"\x81\xa1a", b"\x92\x00")) * self.source.choice(_DEPTHS)
        else:
            data[at : at + 1] = self.source.choice(_LENGTH_BOMBS)

    # ---- trees -------------------------------------------------------------------------------

    def tree(self, data: bytes) -> bytes:
        """Change one or two nodes of a msgpack value. Raises what msgspec does on bytes that are none."""
        value = msgspec.msgpack.decode(data)
        for _ in range(self.source.randint(1, 2)):
            value = self.node(value)
        return msgspec.msgpack.encode(value)

    def node(self, root: Any) -> Any:
        """Change one node; the tree is used up."""
        source = self.source
        if not isinstance(root, list | dict) or not root or source.random() < 0.01:
            return source.choice(_VALUES)
        parent, key = self._pick(root)
        match source.randrange(7):
            case 0:
                del parent[key]
            case 1:
                parent[key] = [parent[key]]
            case 2:
                other_parent, other_key = self._pick(root)
                parent[key], other_parent[other_key] = other_parent[other_key], parent[key]
                return root if self._is_tree(root) else None
            case 3 if isinstance(parent, list):
                parent.insert(key, source.choice((source.choice(_VALUES), parent[key])))
            case 4:
                parent[key] = self._shifted(parent[key])
            case _:
                parent[key] = source.choice(_VALUES)
        return root

    def _pick(self, root: Any) -> tuple[Any, Any]:
        """A random place in a tree: its container and the key in it."""
        source, parent = self.source, root
        while True:
            key = source.randrange(len(parent)) if isinstance(parent, list) else source.choice(list(parent))
            child = parent[key]
            if not isinstance(child, list | dict) or not child or source.random() < 0.25:
                return parent, key
            parent = child

    def _is_tree(self, value: Any, depth: int = 0) -> bool:
        """Whether a value has an end: a swap can make a node its own descendant."""
        if depth > 40:
            return False
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return all(self._is_tree(child, depth + 1) for child in children)

    def _shifted(self, value: Any) -> Any:
        """Something of the same type."""
        source = self.source
        if isinstance(value, bool) or value is None:
            return not value
        if isinstance(value, int):
            return min(max(value + source.choice((-1, 1, 2, -(2**31), 2**31, 2**32)), -(2**63)), 2**64 - 1)
        if isinstance(value, float):
            return value * source.choice((-1.0, 0.5, 1e300))
        if isinstance(value, str):
            return source.choice((value * 2, value[1:], value[:-1], value + "\x7f", value.upper()))[:512]
        if isinstance(value, list):
            return source.choice((value * 2, value[1:], value[:-1], value[::-1]))[:512]
        return value

    # ---- text --------------------------------------------------------------------------------

    def text(self, text: str, words: Sequence[str]) -> str:
        """Change lines and words of a document; `words` are put where a word was."""
        source = self.source
        lines = text.split("\n")
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(lines))
            line = lines[at]
            match source.randrange(9):
                case 0:
                    del lines[at]
                    lines = lines or [""]
                case 1:
                    lines.insert(at, source.choice(lines))
                case 2:
                    lines[at] = " " * source.randrange(4) + line
                case 3:
                    lines[at] = line.lstrip()
                case 4 | 5:
                    key, colon, _ = line.partition(":")
                    lines[at] = f"{key}{colon} {source.choice(words)}"
                case 6:
                    lines[at] = line.replace(source.choice(words), source.choice(words))
                case 7:
                    cut = source.randrange(len(line) + 1)
                    lines[at] = line[:cut] + source.choice(words) + line[cut:]
                case _:
                    lines[at] = self.raw(line.encode() or b"x").decode("latin-1")
        return "\n".join(lines)[:MAX_FRAME_BYTES]
