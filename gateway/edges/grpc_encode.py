"""`gateway.v1` responses as protobuf wire bytes, made by hand.

Building a protobuf object per message costs about ten times as much as these concatenations. The bytes are the
ones that protobuf's own serialiser produces (fields in order, packed numbers, explicit presence), which the tests
check. Wire format: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import copysign, inf

from gateway.core.request import Sequence
from gateway.edges.varint import VARINTS, Memo, pack, varint
from gateway.types import FinishReason, TokenLogprob
from gateway.v1 import gateway_pb2

# Tag bytes: field number << 3 | wire type (0 varint, 2 length-delimited, 5 four bytes).
_REQUEST_ID = b"\x0a"
_INDEX = b"\x10"
_TOKEN_IDS = b"\x1a"
_LOGPROBS = b"\x22"
_FINISH = b"\x2a"
_ATTEMPTS = b"\x30"
_LOGPROB = b"\x0d"
_TOP = b"\x12"
_TOP_TOKEN_ID = b"\x08"
_TOP_LOGPROB = b"\x15"
_OUTPUTS = b"\x0a"
_ERRORS = b"\x12"

FULL_MESSAGE_BYTES = 1024 * 1024
"""A message takes no more once it has this size: it stays well below the 4 MiB that clients accept by default."""
_SMALL_TOKENS = 1024
"""This many are never too much for a message: with the most alternatives that can be asked for (128) some 1.8 MiB."""
# The most that a token, its log probability and each alternative take, with their tags and lengths.
_MAX_TOKEN_BYTES = 5
_MAX_LOGPROB_BYTES = 9
_MAX_TOP_BYTES = 13

# The reason, and the tag of what follows it.
_REASONS: dict[FinishReason, bytes] = {
    "stop": bytes((0x08, gateway_pb2.FINISH_REASON_STOP, 0x10)),
    "length": bytes((0x08, gateway_pb2.FINISH_REASON_LENGTH, 0x10)),
    "abort": bytes((0x08, gateway_pb2.FINISH_REASON_ABORT, 0x10)),
    "error": bytes((0x08, gateway_pb2.FINISH_REASON_ERROR, 0x10)),
}
_pack_float = struct.Struct("<f").pack


def _encode_token(token_id: int) -> bytes:
    payload = varint(token_id)
    return _TOKEN_IDS + varint(len(payload)) + payload


# One token a message is the common case by far, so its whole field is remembered.
_ONE_TOKEN = Memo(_encode_token)


def encode_head(request_id: str, index: int) -> bytes:
    """The fields of GenerateResponse that every message of a sequence starts with."""
    name = request_id.encode()
    return b"".join((_REQUEST_ID, varint(len(name)), name, _INDEX, varint(index)))


def encode_output(head: bytes, sequence: Sequence, rest: list[bytes]) -> bytes:
    """Take the sequence's outbox as one GenerateResponse; empty when there is nothing to say.

    What is too much for one message (an answer that waited for its turn can be) is appended to `rest`, as messages
    to be sent after the returned one.
    """
    token_ids, logprobs = sequence.take()
    finish = sequence.finish
    if not logprobs and not finish:
        if len(token_ids) == 1:
            return head + _ONE_TOKEN[token_ids[0]]
        if not token_ids:
            return b""
    if len(token_ids) <= _SMALL_TOKENS:
        return _encode_response(head, token_ids, logprobs, sequence, finish)
    messages = _encode_in_parts(head, token_ids, logprobs, sequence, finish)
    rest += messages[1:]
    return messages[0]


def _encode_in_parts(
    head: bytes,
    token_ids: Seq[int],
    logprobs: Seq[TokenLogprob] | None,
    sequence: Sequence,
    finish: FinishReason,
) -> list[bytes]:
    step = _tokens_per_message(logprobs)
    starts = range(0, len(token_ids), step)
    return [
        _encode_response(
            head,
            token_ids[start : start + step],
            logprobs[start : start + step] if logprobs else None,
            sequence,
            finish if start == starts[-1] else "",
        )
        for start in starts
    ]


def _tokens_per_message(logprobs: Seq[TokenLogprob] | None) -> int:
    """How many tokens make a message of about `FULL_MESSAGE_BYTES`, at worst."""
    alternatives = max(len(item.top) for item in logprobs) if logprobs else 0
    token_bytes = _MAX_TOKEN_BYTES + (_MAX_LOGPROB_BYTES + _MAX_TOP_BYTES * alternatives if logprobs else 0)
    return max(1, FULL_MESSAGE_BYTES // token_bytes)


def _encode_response(
    head: bytes,
    token_ids: Seq[int],
    logprobs: Seq[TokenLogprob] | None,
    sequence: Sequence,
    finish: FinishReason,
) -> bytes:
    response = head
    if len(token_ids) == 1:
        response += _ONE_TOKEN[token_ids[0]]
    elif token_ids:
        response += encode_tokens(token_ids)
    if logprobs:
        response += b"".join([_encode_logprob(item) for item in logprobs])
    return response + _encode_finish(sequence, finish) if finish else response


def encode_tokens(token_ids: Seq[int]) -> bytes:
    """Field `token_ids`; not empty."""
    payload = pack(token_ids)
    return _TOKEN_IDS + varint(len(payload)) + payload


def encode_many(outputs: Iterable[bytes], errors: Iterable[bytes]) -> bytes:
    """A GenerateManyResponse of serialised outputs and errors."""
    parts: list[bytes] = []
    for output in outputs:
        parts += (_OUTPUTS, VARINTS[len(output)], output)
    for error in errors:
        parts += (_ERRORS, varint(len(error)), error)
    return b"".join(parts)


def _encode_logprob(item: TokenLogprob) -> bytes:
    parts = [_LOGPROB, _float(item.logprob)]
    for token_id, logprob in item.top:
        body = b"".join((_TOP_TOKEN_ID, varint(token_id), _TOP_LOGPROB, _float(logprob)))
        parts += (_TOP, varint(len(body)), body)
    body = b"".join(parts)
    return b"".join((_LOGPROBS, varint(len(body)), body))


def _encode_finish(sequence: Sequence, finish: FinishReason) -> bytes:
    attempt = sequence.attempt
    body = (
        _REASONS[finish]
        + VARINTS[len(sequence.request.arrived.prompt_token_ids)]
        + b"\x18"
        + VARINTS[sequence.completion_tokens]
        + b"\x20"
        + VARINTS[sequence.cached_tokens]
    )
    if attempt is not None:
        body += b"\x28" + VARINTS[attempt.rank]
    # Last, because an answer from the response cache has no rank: no attempts are a fact, rank 0 is not.
    body += _ATTEMPTS + VARINTS[sequence.attempts]
    return _FINISH + VARINTS[len(body)] + body


def _float(value: float) -> bytes:
    try:
        return _pack_float(value)
    except OverflowError:  # beyond float32: infinite, as protobuf stores it
        return _pack_float(copysign(inf, value))
