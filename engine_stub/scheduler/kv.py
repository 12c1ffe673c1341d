"""KV of sequences: block tables, the prefix cache beside them, and the figures in tokens.

`used_tokens` are stored positions, each shared block counted once; `pool.used` are blocks, so
`pool.used * block_size` is what is reserved. `high_water_tokens` is the most that was ever stored at one
moment, finished sequences of that very step included.
"""

from engine_stub.scheduler.blocks import BlockPool
from engine_stub.scheduler.config import SchedulerConfig
from engine_stub.scheduler.prefix import PrefixCache
from engine_stub.scheduler.sequence import Sequence

# Share of the pool that stays free when an optimistic scheduler starts a sequence beside running ones;
# without headroom the newcomer is preempted by its neighbours' next block.
WATERMARK = 0.01


class KvStore:
    """The pool of one rank. Every method leaves tables, references and counts consistent."""

    def __init__(self, config: SchedulerConfig, *, records_events: bool = False) -> None:
        self.block_size = config.block_size
        self.prefix = PrefixCache(config.block_size, records_events=records_events) if config.prefix_cache else None
        self.pool = BlockPool(config.total_blocks, None if self.prefix is None else self.prefix.evict)
        self.used_tokens = 0
        self.high_water_tokens = 0
        self._mode = config.kv_admission

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many positions."""
        return -(-tokens // self.block_size)

    def start(self, sequence: Sequence, *, is_alone: bool) -> bool:
        """Give a sequence blocks for all text that must be computed; False, with nothing taken, if they aren't there.

        What the prefix cache knows is shared and counts as computed. In `reserve` mode the rest of the
        worst case is promised; an optimistic start beside others leaves headroom.
        """
        pool = self.pool
        hits = self.prefix.lookup(sequence) if self.prefix and sequence.request.uses_prefix_cache else []
        needed = self.blocks_for(sequence.target) - len(hits)
        idle_hits = pool.idle_among(hits)
        promised = headroom = 0
        if self._mode == "reserve":
            worst = self.blocks_for(sequence.prompt_len + sequence.limit - 1)
            promised = worst - len(hits) - needed
        elif self._mode == "optimistic" and not is_alone:
            headroom = int(pool.total * WATERMARK)
        if needed + idle_hits + promised + headroom > pool.available:
            return False
        pool.share(hits)
        sequence.blocks = hits + pool.take(needed)
        pool.promise(promised)
        sequence.promised = promised
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.computed = cached = len(hits) * self.block_size
        sequence.inserted = len(hits)
        self.store(idle_hits * self.block_size)
        if self.prefix is not None and sequence.request.uses_prefix_cache:
            self.prefix.count(sequence, len(hits))
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
        return True

    def grow(self, sequence: Sequence) -> bool:
        """One more block for the next position; False when none is available."""
        if sequence.promised:
            sequence.promised -= 1
            sequence.blocks += self.pool.take_promised(1)
        elif self.pool.available:
            sequence.blocks += self.pool.take(1)
        else:
            return False
        sequence.capacity += self.block_size
        return True

    def store(self, tokens: int) -> None:
        """This many positions are stored more than before."""
        self.used_tokens += tokens
        self.high_water_tokens = max(self.high_water_tokens, self.used_tokens)

    def remember(self, sequence: Sequence) -> None:
        """Let the prefix cache have the full blocks that a sequence has stored."""
        if self.prefix is not None and sequence.request.uses_prefix_cache:
            self.prefix.insert(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take everything back, stored or promised; full blocks go into the prefix cache first."""
        self.remember(sequence)
        known = () if self.prefix is None else self.prefix.hash_of
        shared = self.pool.give_back(sequence.blocks, sequence.promised, known)
        self.used_tokens -= sequence.computed - shared * self.block_size
        sequence.blocks = []
        sequence.capacity = 0
        sequence.promised = 0
        sequence.computed = 0
        sequence.inserted = 0

    def check(self, active: list[Sequence]) -> None:
        """Assert that blocks, references, promises and token counts add up over the sequences with a slot."""
        pool, size = self.pool, self.block_size
        references: dict[int, int] = {}
        stored: dict[int, int] = {}
        for sequence in active:
            assert sequence.computed <= sequence.capacity == len(sequence.blocks) * size
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for position, block in enumerate(sequence.blocks):
                references[block] = references.get(block, 0) + 1
                filled = min(max(sequence.computed - position * size, 0), size)
                assert references[block] == 1 or stored[block] == filled == size, "only full blocks are shared"
                stored[block] = filled
        assert pool.used == len(references)
        assert all(pool.references(block) == count for block, count in references.items())
        assert pool.promised == sum(sequence.promised for sequence in active)
        assert 0 <= pool.available <= pool.total
        assert pool.high_water <= pool.total
        assert self.used_tokens == sum(stored.values()) <= self.high_water_tokens
        assert self.high_water_tokens <= pool.total * size
