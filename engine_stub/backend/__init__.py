"""The one seam to a model: a backend turns a step's plan into the next tokens, in one fused call.

The contract between scheduler and model:

* A step is one call `forward(plan) -> ForwardOutput`. `plan.items()` lists what must run, one
  `StepItem` per sequence: token ids, start position, block table, whether a token is wanted, sampling,
  seed, logprobs. Decodes come first, then prefill chunks; several of each may be in one step, and all
  of them are one call of the model. The answer is built with `ForwardOutput.of_items(plan, tokens,
  logprobs)`, parallel to the items: None for an item with `needs_token=False`.
* KV is a pool of `config.scheduler.total_blocks` blocks of `config.scheduler.block_size` positions,
  made by the backend when it is created, `[0, total_blocks)` being the block ids of the tables.
  Position p of a sequence is row `p % block_size` of block `block_table[p // block_size]`. A step
  stores the K and V of all its items before any of them attends; an item attends to positions
  `0 .. its own`. Blocks come back to the pool without notice and are reused: what an item's table
  holds below `start` is always valid (written by earlier steps, or by another sequence with the very
  same prefix, for sequences that share blocks), what other blocks hold is garbage.
* Chunked prompts: chunks of one sequence come in order, in different steps. After a preemption the
  whole text (prompt + output so far) comes again as prefill, from `start` = what the prefix cache kept.
* A draw depends on (seed, position) and the text only: `item.position` is the index of the new token in
  prompt + output. Never on the batch, so that a token is the same wherever and whenever it is made.
* `forward` may be called again for the same plan, or for the part of it that is left when the step is
  retried without its prefills (see `engine_stub.forwarding`): it must not keep state that a repetition
  would spoil. State per sequence, if any, goes into `sequence.model_state`; a sequence may end without
  notice. An exception fails the items of the call, the scheduler lives on.
* `info` says what the backend is; it is read once. `info.recipe` is hashed into the rank's
  `recipe_fingerprint`: everything that decides an output bit (architecture, weights digest, numerics),
  nothing else, so that equal fingerprints mean equal tokens.

To add a backend: a module beside `synthetic` with a class that implements `Backend`, and one line in
`registry.py`.
"""

from typing import Any, Literal, Protocol

import msgspec

from engine_stub.scheduler.plan import ForwardOutput, StepItem, StepPlan

__all__ = ["Backend", "BackendInfo", "ForwardOutput", "StepItem", "StepPlan"]

Numerics = Literal["modelled", "exact", "fast"]


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend is, for admission, reports and the ready data. None: not measured, never a guess."""

    name: str
    numerics: Numerics
    """`modelled`: tokens by hash; `exact`: fixed point; `fast`: floating point."""
    batch_invariant: bool
    """Whether an output bit never depends on the batch, chunking, block size or thread count."""
    kv_bytes_per_token: int
    """K and V of one position over all layers: 2 x layers x kv heads x head dim x item size."""
    weight_bytes: int | None = None
    shard_index: int = 0
    shard_count: int = 1
    """Parts that the weights are split into; the scheduler refuses anything but a whole model."""
    recipe: dict[str, Any] = {}
    """JSON-safe: all that decides an output bit."""


class Backend(Protocol):
    """A model. The scheduler decides what runs; the backend only computes it."""

    name: str

    @property
    def info(self) -> BackendInfo:
        """What this backend is; constant."""
        ...

    def forward(self, plan: StepPlan) -> ForwardOutput:
        """Compute one step: the next token of every decode row and of every last prefill chunk.

        See the module's contract. `synthetic` reads `plan.decodes` and `plan.prefills` directly, which is
        cheaper than `plan.items()`; a real model has no use for that.
        """
        ...
