"""Settings of the tick machine. `null` means unlimited; a profile is one set of these values."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

KvAdmission = Literal["single", "reserve", "optimistic"]
Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]

_ZERO_IS_UNLIMITED = ("token_budget", "prefill_chunk_size")


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of one rank's scheduler. Tokens are model tokens, a block is `block_size` KV positions.

    `kv_admission` decides what KV a sequence needs before it starts, and what happens when none is left:

    * `single`: nothing but that its whole generation would fit alone. It takes a slot inside `submit`
      and blocks when its prompt runs; when a decode finds no block, the youngest sequence loses its KV
      and ends with `cache_miss`.
    * `reserve`: its worst case is promised to it, so nothing is ever preempted.
    * `optimistic`: blocks for its text, more as the text grows; when none is left, the youngest goes
      back to the head of the queue and recomputes.
    """

    max_active: Annotated[Count, Meta(description="sequences with a slot, prefilling or decoding")] = 256
    max_batch_size: Annotated[Count | None, Meta(description="decode rows in one step")] = None
    token_budget: Annotated[
        CountOrZero | None, Meta(description="tokens in one step, decode and prefill together; 0 as null")
    ] = 8192
    prefill_chunk_size: Annotated[
        CountOrZero | None, Meta(description="prompt tokens of one sequence in one step; 0 as null")
    ] = None
    whole_prompts: Annotated[
        bool, Meta(description="never split a prompt: the first one runs whatever the caps on prompt tokens say")
    ] = False
    max_prefill_tokens_per_tick: Annotated[Count | None, Meta(description="prompt tokens in one step")] = None
    max_prefills_per_tick: Annotated[Count | None, Meta(description="prompts in one step")] = None
    recycle_batch: Annotated[
        bool,
        Meta(
            description="the running batch grows by max_prefills_per_tick slots in a step; done slots are refilled all"
        ),
    ] = False
    prefill_before_decode: Annotated[
        bool, Meta(description="a prompt's last position is a decode row of the same step, not part of the prefill")
    ] = False
    slot_reuse: Annotated[
        Literal["next_tick"], Meta(description="a slot freed in one step is filled at the start of the next")
    ] = "next_tick"
    force_batched: Annotated[bool, Meta(description="plan a lone sequence as a batch too, without the short cut")] = (
        False
    )
    kv_tokens: Annotated[Count, Meta(description="KV capacity; rounded down to whole blocks")] = 400_000
    block_size: Annotated[Count, Meta(description="KV positions in one block (page)")] = 16
    kv_admission: KvAdmission = "optimistic"
    prefix_cache: Annotated[bool, Meta(description="keep full blocks for later prompts; a request can opt out")] = True
    scratch_bytes: Annotated[
        CountOrZero | None, Meta(description="activation memory of all active sequences; null: not bounded")
    ] = None
    scratch_bytes_per_session: Annotated[CountOrZero, Meta(description="activation memory of one sequence")] = 0
    weight_budget_bytes: Annotated[
        Count | None, Meta(description="reported beside the weights' size, never enforced")
    ] = None
    max_queue_depth: Annotated[CountOrZero | None, Meta(description="sequences that wait for a slot")] = None
    hold_until_queued: Annotated[
        CountOrZero, Meta(description="test hook: start nothing until this many wait, once")
    ] = 0

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other (ValueError)."""
        for name in _ZERO_IS_UNLIMITED:
            if getattr(self, name) == 0:
                msgspec.structs.force_setattr(self, name, None)
        if self.kv_tokens < self.block_size:
            raise ValueError(f"kv_tokens {self.kv_tokens} is less than one block of {self.block_size}: raise it")
        if self.whole_prompts and (self.token_budget is not None or self.prefill_chunk_size is not None):
            raise ValueError("whole_prompts contradicts token_budget and prefill_chunk_size: set both to null")
        if self.prefill_before_decode and self.max_batch_size is not None and self.max_batch_size < self.max_active:
            raise ValueError("prefill_before_decode needs max_batch_size of at least max_active, or null")
        if self.recycle_batch and self.max_prefills_per_tick is None:
            raise ValueError("recycle_batch needs max_prefills_per_tick: by how many slots the batch grows in a step")

    @property
    def total_blocks(self) -> int:
        """Whole blocks in the pool."""
        return self.kv_tokens // self.block_size

    @property
    def capacity_tokens(self) -> int:
        """KV positions in the pool."""
        return self.total_blocks * self.block_size

    @property
    def active_cap(self) -> int:
        """Slots that can be in use: `max_active`, and no more than the scratch memory serves."""
        if self.scratch_bytes is None or not self.scratch_bytes_per_session:
            return self.max_active
        return min(self.max_active, self.scratch_bytes // self.scratch_bytes_per_session)
