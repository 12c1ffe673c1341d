"""Complete answers of requests that would get the same answer again, by what decides the answer.

Only greedy and seeded requests have a key. Only answers that were complete and successful are stored, and only whole
ones are handed out: a hit is replayed as if a rank had generated it. Least recently used ones go first.
"""

import hashlib
from array import array
from collections import OrderedDict

import msgspec

from gateway.config.scheduling import ResponseCache as Settings
from gateway.core.events import RequestArrived
from gateway.core.request import BYTES_PER_TOKEN, Request, Sequence
from gateway.types import FinishReason, TokenLogprob

# What CPython takes for them, rounded up (a test measures it): an entry with its 32-byte key and its node in the
# order of use; a sequence beside its tokens; a token's log probability and each alternative as objects of their own.
ENTRY_BYTES = 344
SEQUENCE_BYTES = 176
LOGPROB_BYTES = 112
ALTERNATIVE_BYTES = 128
SMALLEST_BYTES = ENTRY_BYTES + SEQUENCE_BYTES


# Stored answers live long and hold no cycles: the garbage collector need not walk through them.
class CachedSequence(msgspec.Struct, frozen=True, gc=False):
    """One continuation. `cached_tokens` is the prompt's cache hit on the rank that generated it."""

    token_ids: "array[int]"
    logprobs: tuple[TokenLogprob, ...] | None
    finish: FinishReason
    cached_tokens: int


class CachedAnswer(msgspec.Struct, frozen=True, gc=False):
    """All sequences of a request, in order of their index. `nbytes` is what storing it takes, its key included."""

    sequences: tuple[CachedSequence, ...]
    prompt_tokens: int
    nbytes: int


class _Entry(msgspec.Struct, frozen=True, gc=False):
    answer: CachedAnswer
    stored_at: float


class ResponseCache:
    """The answers in order of their last use, which is when one was given.

    Bounded by bytes, and so in number, as no answer is free. The counters only grow; an expired answer counts as a
    miss as well, `inserts` are answers stored and `evictions` those that went to make room.
    """

    def __init__(self, settings: Settings) -> None:
        self._max_bytes = settings.max_bytes
        self._max_entry_bytes = min(settings.max_entry_bytes, settings.max_bytes)
        self._ttl_s = settings.ttl_s
        self._stored: OrderedDict[bytes, _Entry] = OrderedDict()
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.inserts = 0
        self.evictions = 0
        self.expired = 0
        self.too_large = 0
        self.flushes = 0

    @property
    def entries(self) -> int:
        """Answers that are stored."""
        return len(self._stored)

    def get(self, key: bytes, now: float) -> CachedAnswer | None:
        """The answer for the key; say `used` if it is given to anybody. None, and forgotten, if it is `ttl_s` old."""
        entry = self._stored.get(key)
        if entry is not None and self._ttl_s is not None and now - entry.stored_at >= self._ttl_s:
            self._forget(key)
            self.expired += 1
            entry = None
        if entry is None:
            self.misses += 1
            return None
        return entry.answer

    def used(self, key: bytes) -> None:
        """The answer that `get` just found was given to somebody: it is the last to go now."""
        self._stored.move_to_end(key)
        self.hits += 1

    def put(self, key: bytes, answer: CachedAnswer, now: float) -> bool:
        """Store an answer in place of what the key had. False if it is too large; what the key had then stays."""
        if answer.nbytes > self._max_entry_bytes:
            self.too_large += 1
            return False
        if key in self._stored:
            self._forget(key)
        self._stored[key] = _Entry(answer, now)
        self.nbytes += answer.nbytes
        self.inserts += 1
        while self.nbytes > self._max_bytes:
            self._forget(next(iter(self._stored)))
            self.evictions += 1
        return True

    def flush(self) -> None:
        """Forget everything."""
        self._stored.clear()
        self.nbytes = 0
        self.flushes += 1

    def _forget(self, key: bytes) -> None:
        self.nbytes -= self._stored.pop(key).answer.nbytes

    def check(self) -> None:
        """Assert what must be true between any two calls."""
        sizes = [entry.answer.nbytes for entry in self._stored.values()]
        assert self.nbytes == sum(sizes) <= self._max_bytes
        assert all(0 < size <= self._max_entry_bytes for size in sizes)


_encode = msgspec.msgpack.Encoder().encode


def key_of(arrived: RequestArrived, model_name: str) -> bytes | None:
    """What decides the request's answer, as a SHA-256 digest (32 bytes). None: its answer is not to be cached.

    Greedy and seeded requests have one, unless they decline the cache or ask for a rank. The digest is over everything
    that may change the answer, and the tenant: who shared answers could tell by the time they take what others asked.

    MessagePack prefixes all parts with type and length, so different parts give different bytes, and writes a Struct
    with every field it has, so no sampling parameter can be forgotten. All of it takes about 8 us per 1,000 tokens;
    packing the prompt into an array first takes longer.
    """
    sampling = arrived.sampling
    is_deterministic = sampling.temperature == 0 or sampling.seed is not None
    if not is_deterministic or not arrived.use_cache or arrived.pinned_rank is not None:
        return None
    prompt = arrived.prompt_token_ids
    if type(prompt) is not list:
        prompt = list(prompt)
    parts = (model_name, arrived.tenant, arrived.cache_salt, arrived.n, sampling, prompt)
    return hashlib.sha256(_encode(parts)).digest()


def build(request: Request) -> CachedAnswer | None:
    """A settled request's answer from what its sequences recorded. None if that isn't a complete, successful answer."""
    sequences = request.sequences
    if request.error is not None or len(sequences) != request.arrived.n:
        return None
    if not all(map(_is_complete, sequences)):
        return None
    stored = tuple(map(_copy, sequences))
    nbytes = ENTRY_BYTES + sum(map(_size, stored))
    return CachedAnswer(stored, len(request.arrived.prompt_token_ids), nbytes)


def _is_complete(sequence: Sequence) -> bool:
    """Ended by the model itself or by the token limit, with all that was generated on record."""
    record = sequence.record
    if record is None or not record.is_answer or sequence.finish not in ("stop", "length"):
        return False
    tokens = sequence.completion_tokens
    has_logprobs = sequence.request.arrived.sampling.logprobs is not None
    return len(record.token_ids) == tokens and len(record.logprobs) == (tokens if has_logprobs else 0)


def _copy(sequence: Sequence) -> CachedSequence:
    record = sequence.record
    assert record is not None
    logprobs = None if sequence.request.arrived.sampling.logprobs is None else tuple(record.logprobs)
    # The slice is a copy without the slack that appending leaves.
    return CachedSequence(record.token_ids[:], logprobs, sequence.finish, sequence.cached_tokens)


def _size(sequence: CachedSequence) -> int:
    size = SEQUENCE_BYTES + BYTES_PER_TOKEN * len(sequence.token_ids)
    if sequence.logprobs is not None:
        size += sum(LOGPROB_BYTES + ALTERNATIVE_BYTES * len(item.top) for item in sequence.logprobs)
    return size
