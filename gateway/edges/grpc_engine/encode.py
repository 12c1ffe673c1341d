"""Generate responses of the standard engine services as hand-made protobuf bytes.

One message per flush is the hot path, and building a protobuf object costs ten times what these
bytes cost. Only field numbers differ between the families, so they are data (`Layout`). A test
compares every shape byte for byte with what the protobuf library makes of the same values.

A sequence's final message repeats all its tokens. Packed varints concatenate, so the encoder keeps
the bytes that it already sent instead of the ids.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from gateway.edges.varint import varint
from gateway.types import TokenLogprob


class Layout(NamedTuple):
    """Where the families put the same things. Numbers are protobuf field numbers."""

    request_id: int | None
    chunk: int
    complete: int
    chunk_index: int
    complete_index: int


VLLM = Layout(request_id=None, chunk=1, complete=2, chunk_index=7, complete_index=8)
TOKENSPEED = Layout(request_id=1, chunk=2, complete=3, chunk_index=6, complete_index=9)


def pack(token_ids: Iterable[int]) -> bytes:
    """The payload of a packed `repeated uint32`."""
    return b"".join(map(varint, token_ids))


def _tagged(number: int, payload: bytes | bytearray) -> bytes:
    """A length-delimited field. Empty ones are left out, as proto3 does."""
    return b"".join((b"%c" % (number << 3 | 2), varint(len(payload)), payload)) if payload else b""


def _number(number: int, value: int) -> bytes:
    """A varint field. 0 is left out, as proto3 does."""
    return b"%c%b" % (number << 3, varint(value)) if value else b""


class SequenceEncoder:
    """Writes one sequence's messages, and remembers what the final one must repeat."""

    __slots__ = (
        "_chunk_end",
        "_chunk_middle",
        "_chunk_tag",
        "_complete_end",
        "_complete_tag",
        "_completion_tokens",
        "_floats",
        "_has_logprobs",
        "_ids",
        "_prompt_tokens",
        "_tops",
    )

    def __init__(self, layout: Layout, request_id: str, index: int, prompt_tokens: int) -> None:
        head = b"" if layout.request_id is None else _tagged(layout.request_id, request_id.encode())
        self._chunk_tag = head + b"%c" % (layout.chunk << 3 | 2)
        self._complete_tag = head + b"%c" % (layout.complete << 3 | 2)
        self._chunk_end = _number(layout.chunk_index, index)
        self._complete_end = _number(layout.complete_index, index)
        self._prompt_tokens = prompt_tokens
        # From the prompt's count up to the tag of the completion's count.
        self._chunk_middle = _number(2, prompt_tokens) + b"\x18"
        self._completion_tokens = 0
        self._ids = bytearray()
        self._has_logprobs = False
        self._floats = bytearray()
        self._tops = bytearray()

    def add(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> None:
        """Remember new tokens for the final message without making a chunk of them."""
        self._ids += pack(token_ids)
        self._completion_tokens += len(token_ids)
        if logprobs is not None:
            self._remember(*_logprob_parts(logprobs))

    def chunk(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None, cached_tokens: int) -> bytes:
        """A `GenerateStreamChunk` response with new tokens (at least one); `completion_tokens` is cumulative."""
        ids = varint(token_ids[0]) if len(token_ids) == 1 else pack(token_ids)
        self._ids += ids
        self._completion_tokens = completed = self._completion_tokens + len(token_ids)
        body = b"\x0a" + varint(len(ids)) + ids + self._chunk_middle + varint(completed)
        if cached_tokens:
            body += _number(4, cached_tokens)
        if logprobs is not None:
            floats, tops = _logprob_parts(logprobs)
            self._remember(floats, tops)
            body += _tagged(5, _logprobs(ids, floats, tops))
        body += self._chunk_end
        return self._chunk_tag + varint(len(body)) + body

    def complete(self, finish_reason: str, cached_tokens: int) -> bytes:
        """The `GenerateComplete` response: everything that was generated, and why it ended."""
        body = b"".join(
            (
                _tagged(1, self._ids),
                _tagged(2, finish_reason.encode()),
                _number(3, self._prompt_tokens),
                _number(4, self._completion_tokens),
                _number(5, cached_tokens),
                _tagged(6, _logprobs(self._ids, self._floats, self._tops)) if self._has_logprobs else b"",
                self._complete_end,
            )
        )
        return self._complete_tag + varint(len(body)) + body

    def _remember(self, floats: bytes, tops: bytes) -> None:
        self._has_logprobs = True
        self._floats += floats
        self._tops += tops


def _floats(values: Iterable[float]) -> bytes:
    """The payload of a packed `repeated float`: little-endian, values beyond float32 become infinite."""
    return array("f", values).tobytes()


def _logprob_parts(logprobs: Seq[TokenLogprob]) -> tuple[bytes, bytes]:
    """`(packed chosen logprobs, the repeated TopLogProbs fields)`; no alternatives, no second part."""
    tops = b""
    if any(item.top for item in logprobs):
        tops = b"".join(map(_top, logprobs))
    return _floats([item.logprob for item in logprobs]), tops


def _top(item: TokenLogprob) -> bytes:
    values = _tagged(1, _floats([logprob for _, logprob in item.top]))
    body = values + _tagged(2, pack(token_id for token_id, _ in item.top))
    return b"\x1a%b%b" % (varint(len(body)), body)


def _logprobs(ids: bytes | bytearray, floats: bytes | bytearray, tops: bytes | bytearray) -> bytes:
    """The body of `OutputLogProbs {token_logprobs 1, token_ids 2, top_logprobs 3}`."""
    return b"".join((_tagged(1, floats), _tagged(2, ids), tops))
