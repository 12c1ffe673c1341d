"""The trailing metadata of accepted requests, as pairs and, for our own transport, as a block made by hand."""

from gateway.core.request import Request
from gateway.edges.grpc_context import Metadata
from gateway.edges.grpc_request import REQUEST_ID_KEY
from gateway.edges.varint import Memo
from gateway.edges.waiting import queue_ms
from gateway.h2.protocol.header_blocks import encode_length, encode_name

RANK_KEY = "x-rankgate-rank"
DECISION_ID_KEY = "x-rankgate-decision-id"
QUEUE_MS_KEY = "x-rankgate-queue-ms"
CACHE_KEY = "x-rankgate-cache"

_LENGTHS = Memo(encode_length)
_ID_NAME = encode_name(REQUEST_ID_KEY.encode())
_RANK_NAME = encode_name(RANK_KEY.encode())
_DECISION_NAME = encode_name(DECISION_ID_KEY.encode())
_QUEUE_NAME = encode_name(QUEUE_MS_KEY.encode())
_CACHE_HIT = encode_name(CACHE_KEY.encode()) + b"\x03hit"
_NOT_QUEUED = _QUEUE_NAME + b"\x050.000"


def _encode_rank(rank: int) -> bytes:
    value = b"%d" % rank
    return _RANK_NAME + _LENGTHS[len(value)] + value


_RANKS = Memo(_encode_rank)


def id_metadata(request_id: str) -> tuple[tuple[str, str], ...]:
    """The request's id, as callers get it back."""
    return ((REQUEST_ID_KEY, request_id),)


def trailing_metadata(request: Request) -> Metadata:
    """Where an accepted request went, which decision sent it there, how long it waited for that, or that it need not."""
    ranks = [str(sequence.attempt.rank) for sequence in request.sequences if sequence.attempt is not None]
    trailing: list[tuple[str, str]] = []
    if ranks:
        trailing.append((RANK_KEY, ",".join(ranks)))
    if request.decision_id is not None:
        trailing.append((DECISION_ID_KEY, str(request.decision_id)))
    if request.is_cached:
        trailing.append((CACHE_KEY, "hit"))
    trailing.append((QUEUE_MS_KEY, f"{queue_ms(request):.3f}"))
    return trailing


def trailing_block(request: Request) -> bytes:
    """Its id and `trailing_metadata` as encoded header fields."""
    request_id = request.arrived.request_id.encode()
    block = _ID_NAME + _LENGTHS[len(request_id)] + request_id
    sequences = request.sequences
    waited_ms: float | None = None
    if len(sequences) == 1:
        (sequence,) = sequences
        if sequence.attempt is not None:
            block += _RANKS[sequence.attempt.rank]
        if sequence.sent_at is not None:
            waited_ms = (sequence.sent_at - request.accepted_at) * 1e3
    else:
        ranks = ",".join([str(each.attempt.rank) for each in sequences if each.attempt is not None]).encode()
        if ranks:
            block += _RANK_NAME + _LENGTHS[len(ranks)] + ranks
    if request.decision_id is not None:
        number = b"%d" % request.decision_id
        block += _DECISION_NAME + _LENGTHS[len(number)] + number
    if request.is_cached:
        block += _CACHE_HIT
    if waited_ms is None:
        waited_ms = queue_ms(request)
    if not waited_ms:
        return block + _NOT_QUEUED
    value = b"%.3f" % waited_ms
    return block + _QUEUE_NAME + _LENGTHS[len(value)] + value
