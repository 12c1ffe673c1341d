"""Settings of the tick machine. `null` means unlimited; a profile is one set of these values."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

KvAdmission = Literal["reserve", "optimistic"]
Count = Annotated[int, Meta(ge=1)]


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of one rank's scheduler. Tokens are model tokens, a block is `block_size` KV positions.

    `kv_admission`: `reserve` promises a sequence's worst case before it starts, so nothing is ever
    preempted; `optimistic` takes blocks as text grows and recomputes the youngest when none is left.
    """

    max_active: Annotated[Count, Meta(description="sequences with a slot, prefilling or decoding")] = 256
    max_batch_size: Annotated[Count | None, Meta(description="decode rows in one step")] = None
    token_budget: Annotated[Count | None, Meta(description="tokens in one step, decode and prefill together")] = 8192
    prefill_chunk_size: Annotated[Count | None, Meta(description="prompt tokens of one sequence in one step")] = None
    max_prefill_tokens_per_tick: Annotated[Count | None, Meta(description="prompt tokens in one step")] = None
    max_prefills_per_tick: Annotated[Count | None, Meta(description="prefill chunks in one step")] = None
    kv_tokens: Annotated[Count, Meta(description="KV capacity; rounded down to whole blocks")] = 400_000
    block_size: Annotated[Count, Meta(description="KV positions in one block (page)")] = 16
    kv_admission: KvAdmission = "optimistic"
    max_queue_depth: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="sequences that wait for a slot")
    ] = None
    hold_until_queued: Annotated[int, Meta(ge=0, description="test hook: start nothing until this many wait, once")] = 0

    def __post_init__(self) -> None:
        """Refuse a pool without a single block (ValueError)."""
        if self.kv_tokens < self.block_size:
            raise ValueError(f"kv_tokens {self.kv_tokens} is less than one block of {self.block_size}: raise it")

    @property
    def total_blocks(self) -> int:
        """Whole blocks in the pool."""
        return self.kv_tokens // self.block_size

    @property
    def capacity_tokens(self) -> int:
        """KV positions in the pool."""
        return self.total_blocks * self.block_size
