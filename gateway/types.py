"""Neutral types that cross the boundaries between core, wire, edges and the engine stub.

A leaf module: it imports the standard library and msgspec only. Nothing here knows a wire format,
a socket or a policy. Column-shaped batches are deliberate: both engines send one message per step
for the whole batch, and one pass over a few lists is the cheapest thing Python can do with it.
What is made for every request or batch refers to nothing that refers back, so the collector need not know it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

Protocol = Literal["tokenspeed", "vllm"]
LoadSemantics = Literal["disjoint", "resident"]
"""`disjoint`: running excludes waiting. `resident`: running includes waiting."""
LoadSource = Literal["output", "coordinator"]
"""Whether a report came along with a batch, or by itself."""
FinishReason = Literal["", "stop", "length", "abort", "error"]
"""Why a sequence ended at the engine; the empty string means that it is still running."""


class Family(NamedTuple):
    """What differs between engine families beyond their wire format: what their numbers mean, and what they lack."""

    load_semantics: LoadSemantics
    counts_completion_tokens: bool
    """Whether batches carry cumulative completion counts, so that lost tokens are detectable."""
    refuses_by_abort: bool
    """Whether a request that the engine can't serve ends with `abort`; else that only says that the rank gave it up."""
    has_logprob_alternatives: bool
    """Whether a token's log probability can come with those of other tokens."""
    max_temperature: float
    max_repetition_penalty: float
    """Above these the engine refuses the request; a vLLM rank goes deaf over it."""


FAMILIES: dict[Protocol, Family] = {
    "tokenspeed": Family(
        "resident",
        counts_completion_tokens=True,
        refuses_by_abort=True,
        has_logprob_alternatives=False,
        max_temperature=100.0,
        max_repetition_penalty=2.0,
    ),
    "vllm": Family(
        "disjoint",
        counts_completion_tokens=False,
        refuses_by_abort=False,
        has_logprob_alternatives=True,
        max_temperature=2.0,
        max_repetition_penalty=100.0,
    ),
}
"""The one table of engine families; `gateway.wire.registry` has their codecs."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sampling parameters in API terms, already validated. Engine quirks are the codecs' business.

    `top_k` -1 disables it. `max_tokens` is always set: the edge fills in what the context allows.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attempt as a codec needs it. `wire_id` is unique for ever; the client's id never goes out."""

    wire_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrived_at_unix_s: float = 0.0
    current_wave: int = 0
    """The wave that a rank of a vLLM lockstep group is to count it in."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A load snapshot exactly as the rank reported it; `kv_usage` may be outside [0, 1].

    `step_counter` starts anew with each `wave`. `taken_at_s` is of the rank's own monotonic clock.
    """

    running: int
    waiting: int
    kv_usage: float
    kv_total_pages: int | None = None
    step_counter: int | None = None
    wave: int = 0
    taken_at_s: float | None = None
    source: LoadSource = "output"


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """The chosen token's log probability and the alternatives `(token id, logprob)` that were asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class EngineBatch(msgspec.Struct, kw_only=True, gc=False):
    """One engine step's output for one rank. The columns are parallel to `ids`.

    `token_ids` holds new tokens only. `completion_tokens` is cumulative where the wire carries it.
    `load` is None when the frame held no usable report (`load_fault` then says whether it was bad).
    `failed_ids` names requests whose rows could not be read; `lossy` says that the frame may have
    carried tokens for requests that could not even be named. `messages` that came one after the other
    may be joined to one batch, oldest first; `load` is the last one's then, `earlier_loads` are the others'.
    """

    ids: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    finish: Sequence[FinishReason]
    completion_tokens: Sequence[int] | None = None
    prompt_tokens: Sequence[int] | None = None
    cached_tokens: Sequence[int | None] | None = None
    logprobs: Sequence[Sequence[TokenLogprob] | None] | None = None
    engine_index: int | None = None
    load: EngineLoad | None = None
    load_fault: str | None = None
    failed_ids: Sequence[str] = ()
    lossy: bool = False
    fault: str | None = None
    messages: int = 1
    earlier_loads: Sequence[EngineLoad] = ()


class EngineDead(msgspec.Struct, frozen=True):
    """The rank announced its own end (`ENGINE_CORE_DEAD`)."""


class EngineNoise(msgspec.Struct, frozen=True):
    """A frame that can't have carried tokens: counted by `reason`, otherwise ignored."""

    reason: str


class EngineControl(msgspec.Struct, frozen=True, kw_only=True):
    """Wave control or a utility reply (vLLM)."""

    engine_index: int | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    utility_call_id: int | None = None
    utility_failure: str | None = None


EngineMessage = EngineBatch | EngineDead | EngineNoise | EngineControl


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank said of itself when it registered. None where it did not say."""

    max_model_len: int
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    kv_capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    data_parallel_rank: int | None = None
    engine_version: str = ""
    dtype: str = ""
    instance_id: str = ""
