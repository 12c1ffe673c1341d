"""The prefix cache: full blocks of stored text by the hash of all text up to their end.

A block's hash covers its token ids, its parent's hash and the request's salt (in the first block), so
equal hashes mean equal text from the start on. Blocks are inserted when their KV is stored: a prompt's
after each of its chunks, the rest when the sequence leaves its slot, before its blocks are given back.
Only whole blocks count, and the newest token is never among them: its KV isn't stored yet.

Hits are limited so that at least one position is left to compute: the next token comes from it.
"""

import sys
from array import array
from hashlib import blake2b

import msgspec

from engine_stub.scheduler.blocks import BlockPool
from engine_stub.scheduler.sequence import Sequence

HASH_BYTES = 16
LOOKUP_STRIDE = 8
"""Blocks hashed at a time in a lookup: their text is cut out once, and a miss wastes few."""


class BlocksStored(msgspec.Struct, frozen=True):
    """Consecutive blocks of one text are in the cache now; `parent` is the hash before the first, None at the start."""

    hashes: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    salt: str


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks that were evicted, in that order."""

    hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The cache is empty."""


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class PrefixStats(msgspec.Struct):
    """Lookups since the start, in requests and in prompt tokens; a preempted sequence's return counts apart."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    evictions: int = 0


class PrefixCache:
    """Content of a pool's full blocks. `events` fill up while `records_events`; whoever wants them empties the list."""

    def __init__(self, block_size: int, *, records_events: bool = False) -> None:
        self.stats = PrefixStats()
        self.events: list[CacheEvent] = []
        self.records_events = records_events
        self.hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._block_of)

    def lookup(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a sequence's text starts with."""
        limit = (sequence.target - 1) // self._block_size
        block_of = self._block_of
        hits: list[int] = []
        for position in range(limit if block_of else 0):
            if position == len(sequence.hashes):
                self._hash_up_to(sequence, min(limit, position + LOOKUP_STRIDE))
            block = block_of.get(sequence.hashes[position])
            if block is None:
                break
            hits.append(block)
        return hits

    def count(self, sequence: Sequence, hits: int) -> None:
        """Note a lookup whose sequence has started with `hits` cached blocks."""
        stats, tokens = self.stats, hits * self._block_size
        if sequence.generated:
            stats.preempted_requests += 1
            stats.preempted_queries += sequence.target
            stats.preempted_hits += tokens
        else:
            stats.requests += 1
            stats.queries += sequence.target
            stats.hits += tokens

    def insert(self, sequence: Sequence) -> None:
        """Remember the full blocks of a sequence's stored text that are not known yet."""
        full = sequence.computed // self._block_size
        if full <= sequence.inserted:
            return
        self._hash_up_to(sequence, full)
        run: list[int] = []
        for position in range(sequence.inserted, full):
            digest, block = sequence.hashes[position], sequence.blocks[position]
            if digest in self._block_of:  # the same text was stored twice at the same time: one copy is enough
                self._note_stored(sequence, run)
                run = []
            else:
                self._block_of[digest] = block
                self.hash_of[block] = digest
                run.append(position)
        self._note_stored(sequence, run)
        sequence.inserted = full

    def evict(self, block: int) -> None:
        """A known block is taken for other content."""
        digest = self.hash_of.pop(block)
        del self._block_of[digest]
        self.stats.evictions += 1
        if self.records_events:
            last = self.events[-1] if self.events else None
            if isinstance(last, BlocksRemoved):
                last.hashes.append(digest)
            else:
                self.events.append(BlocksRemoved([digest]))

    def reset(self, pool: BlockPool) -> bool:
        """Forget everything; False, with nothing done, while sequences hold blocks (as vLLM's own call)."""
        if pool.used:
            return False
        self.hash_of.clear()
        self._block_of.clear()
        pool.forget_idle()
        if self.records_events:
            self.events.append(AllBlocksCleared())
        return True

    def _hash_up_to(self, sequence: Sequence, count: int) -> None:
        hashes, size = sequence.hashes, self._block_size
        first = len(hashes)
        parent = hashes[-1] if hashes else _root(sequence.request.cache_salt)
        words = array("I", sequence.text(first * size, count * size))
        if sys.byteorder == "big":
            words.byteswap()
        data, width = words.tobytes(), words.itemsize * size
        for start in range(0, len(data), width):
            parent = blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest()
            hashes.append(parent)

    def _note_stored(self, sequence: Sequence, run: list[int]) -> None:
        if run and self.records_events:
            first, size = run[0], self._block_size
            self.events.append(
                BlocksStored(
                    [sequence.hashes[position] for position in run],
                    sequence.hashes[first - 1] if first else None,
                    sequence.text(first * size, (run[-1] + 1) * size),
                    sequence.request.cache_salt,
                )
            )


def _root(salt: str) -> bytes:
    """The parent of first blocks: texts under different salts share nothing."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"cache-salt").digest()
