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
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from gateway.core.request import Record, Sequence
from gateway.edges.varint import SMALL, SMALL_VARINTS, VARINTS, pack, varint
from gateway.types import TokenLogprob

if TYPE_CHECKING:
    from gateway.edges.grpc_context import MessageStream
    from gateway.edges.grpc_writer import StreamWriter


class Layout(NamedTuple):
    """Where the families put the same things. Numbers are protobuf field numbers."""

    request_id: int | None
    chunk: int
    complete: int
    chunk_index: int
    complete_index: int


VLLM = Layout(request_id=None, chunk=1, complete=2, chunk_index=7, complete_index=8)
TOKENSPEED = Layout(request_id=1, chunk=2, complete=3, chunk_index=6, complete_index=9)


def _tagged(number: int, payload: bytes | bytearray) -> bytes:
    """A length-delimited field. Empty ones are left out, as proto3 does."""
    return b"".join((b"%c" % (number << 3 | 2), varint(len(payload)), payload)) if payload else b""


_FINISH = {reason: _tagged(2, reason.encode()) for reason in ("", "stop", "length", "abort", "error")}


def _number(number: int, value: int) -> bytes:
    """A varint field. 0 is left out, as proto3 does."""
    return b"%c%b" % (number << 3, varint(value)) if value else b""


class _Frame(NamedTuple):
    """What every message of a sequence with one index begins and ends with, up to the request id."""

    chunk_tag: bytes
    chunk_end: bytes
    complete_tag: bytes
    complete_end: bytes


@lru_cache(1024)
def _frame(layout: Layout, index: int) -> _Frame:
    return _Frame(
        b"%c" % (layout.chunk << 3 | 2),
        _number(layout.chunk_index, index),
        b"%c" % (layout.complete << 3 | 2),
        _number(layout.complete_index, index),
    )


_LOW_OF_2 = [bytes((0x0A, 2, low | 0x80)) for low in range(0x80)]
_LOW_OF_3 = [bytes((0x0A, 3, low | 0x80)) for low in range(0x80)]
"""By its lowest seven bits: how the field of token ids begins that has a single id, whose varint has so many bytes.

The rest is the varint of the higher bits. Two small tables stay in the caches, where one of all ids would not.
"""
_LARGE = SMALL << 7


class SequenceEncoder:
    """Writes one sequence's messages, and remembers what the final one must repeat.

    With `has_record` that is the sequence's own record, which will have all of its tokens. `stream` and `writer` are for
    `flush`, see `Lane`.
    """

    __slots__ = (
        "_bare_end",
        "_cached_tokens",
        "_chunk_end",
        "_chunk_middle",
        "_chunk_tag",
        "_complete_end",
        "_complete_tag",
        "_completed",
        "_floats",
        "_has_logprobs",
        "_ids",
        "_prompt_tokens",
        "_tops",
        "is_complete",
        "stream",
        "writer",
    )

    def __init__(
        self, layout: Layout, request_id: str, index: int, prompt_tokens: int, *, has_record: bool = False
    ) -> None:
        self._chunk_tag, self._chunk_end, self._complete_tag, self._complete_end = _frame(layout, index)
        if layout.request_id is not None:
            head = _tagged(layout.request_id, request_id.encode())
            self._chunk_tag = head + self._chunk_tag
            self._complete_tag = head + self._complete_tag
        self._bare_end = self._chunk_end
        self._prompt_tokens = prompt_tokens
        # From the prompt's count up to the tag of the completion's count.
        self._chunk_middle = b"\x10" + VARINTS[prompt_tokens] + b"\x18" if prompt_tokens else b"\x18"
        self._cached_tokens = 0
        self._completed = 0
        # What was sent; None where the sequence's own record has it.
        self._ids: bytearray | None = None if has_record else bytearray()
        self._has_logprobs = False
        # Whether the final message was made.
        self.is_complete = False
        self.stream: MessageStream | None = None
        self.writer: StreamWriter | None = None

    def flush(self, sequence: Sequence) -> None:
        """As a `Sink`'s, in the place of the writer's: one more token, as most flushes have, leaves by one call from here."""
        stream, pending = self.stream, sequence.pending
        if stream is None:
            if self.writer is not None:
                self.writer.flush(sequence)
            return
        if (
            len(pending) != 1
            or sequence.finish
            or sequence.logprobs is not None
            or sequence.packed is not None
            or sequence.cached_tokens != self._cached_tokens
        ):
            self._flush_any(stream, sequence)
            return
        # What `Sequence.take` and `chunk` do.
        sequence.is_dirty = False
        sequence.held_bytes = 0
        sequence.pending = ()
        token_id = pending[0]
        if 0x7F < token_id < _LARGE:
            field = (_LOW_OF_3 if token_id > 0x3FFF else _LOW_OF_2)[token_id & 0x7F] + SMALL_VARINTS[token_id >> 7]
        else:
            field = _tagged(1, varint(token_id))
        ids = self._ids
        if ids is not None:
            ids += field[2:]  # without its tag and length
        self._completed = completed = self._completed + 1
        count = SMALL_VARINTS[completed] if completed < SMALL else VARINTS[completed]
        body = field + self._chunk_middle + count + self._chunk_end
        message = self._chunk_tag + SMALL_VARINTS[len(body)] + body
        self._send(stream, message)

    def _flush_any(self, stream: "MessageStream", sequence: Sequence) -> None:
        token_ids, logprobs = sequence.take()
        if token_ids:
            self._send(stream, self.chunk(token_ids, logprobs, sequence.cached_tokens))
        if sequence.finish:
            self._send(stream, self.complete(sequence.finish, sequence.cached_tokens, sequence.record))

    def _send(self, stream: "MessageStream", message: bytes) -> None:
        if not stream.push(message) and self.writer is not None:
            self.writer.push(message)

    def add(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> None:
        """Remember new tokens for the final message without making a chunk of them."""
        if self._ids is not None:
            self._ids += pack(token_ids)
        self._completed += len(token_ids)
        if logprobs is not None:
            self._remember(*_logprob_parts(logprobs))

    def chunk(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None, cached_tokens: int) -> bytes:
        """A `GenerateStreamChunk` response with new tokens (at least one); `completion_tokens` is cumulative."""
        if cached_tokens != self._cached_tokens:
            self.note_cached(cached_tokens)
        ids = pack(token_ids)
        if self._ids is not None:
            self._ids += ids
        self._completed = completed = self._completed + len(token_ids)
        body = b"\x0a" + VARINTS[len(ids)] + ids + self._chunk_middle + VARINTS[completed]
        if logprobs is None:
            body += self._chunk_end
        else:
            floats, tops = _logprob_parts(logprobs)
            self._remember(floats, tops)
            body += _number(4, cached_tokens) + _tagged(5, _logprobs(ids, floats, tops)) + self._bare_end
        return self._chunk_tag + VARINTS[len(body)] + body

    def note_cached(self, cached_tokens: int) -> None:
        """So many of the prompt's tokens came from the rank's cache: `chunk_end` says so from here on."""
        self._cached_tokens = cached_tokens
        self._chunk_end = _number(4, cached_tokens) + self._bare_end

    def complete(self, finish_reason: str, cached_tokens: int, record: Record | None = None) -> bytes:
        """The `GenerateComplete` response: everything that was taken of the sequence, and why it ended."""
        self.is_complete = True
        completed, prompt_tokens = self._completed, self._prompt_tokens
        ids: bytes | bytearray | None = self._ids
        if ids is None:
            assert record is not None
            ids = pack(record.token_ids[:completed])
        body = _FINISH[finish_reason]
        if ids:
            body = b"\x0a" + VARINTS[len(ids)] + bytes(ids) + body
        if prompt_tokens:
            body += b"\x18" + VARINTS[prompt_tokens]
        if completed:
            body += b"\x20" + VARINTS[completed]
        if cached_tokens:
            body += b"\x28" + VARINTS[cached_tokens]
        if self._has_logprobs:
            body += _tagged(6, _logprobs(ids, self._floats, self._tops))
        body += self._complete_end
        return self._complete_tag + VARINTS[len(body)] + body

    def _remember(self, floats: bytes, tops: bytes) -> None:
        if not self._has_logprobs:
            self._has_logprobs = True
            self._floats, self._tops = bytearray(), bytearray()
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
    body = values + _tagged(2, pack([token_id for token_id, _ in item.top]))
    return b"\x1a%b%b" % (varint(len(body)), body)


def _logprobs(ids: bytes | bytearray, floats: bytes | bytearray, tops: bytes | bytearray) -> bytes:
    """The body of `OutputLogProbs {token_logprobs 1, token_ids 2, top_logprobs 3}`."""
    return b"".join((_tagged(1, floats), _tagged(2, ids), tops))
