"""vLLM's output message, `EngineCoreOutputs`, and the meaning of its parts.

Positions after vLLM 0.24 to 0.32 (`vllm/v1/engine/__init__.py`). Message: engine_index, outputs,
scheduler_stats map, timestamp, utility_output, finished_requests, wave_complete, start_wave (8), ...
Row: request_id, new_token_ids, new_logprobs, prompt logprobs, pooling output, finish_reason,
stop_reason, events, kv_transfer_params (9), then fields that releases insert and shift. Of those only
`prefill_stats` is read, a map with `num_cached_tokens` in a request's first row (position 10 in 0.24,
11 since 0.28): it is found by its key. Statistics are maps by name.
"""

import math
from typing import Final

import msgspec
from msgspec import Raw

from gateway.types import EngineLoad, FinishReason, LoadSource
from gateway.wire.common import MAX_UINT32, Fault, Opaque, Tokens
from gateway.wire.vllm.tensors import Logprobs


class PrefillStats(msgspec.Struct):
    """A map in the shifting part of a row; every other map there decodes to this without the count."""

    num_cached_tokens: Opaque = None


Shifting = PrefillStats | list[Raw] | str | int | float | bool | None


class SteadyRow(msgspec.Struct, array_like=True, gc=False):
    """A row of a request that is past its first token and wants no logprobs: what nearly all rows are."""

    request_id: str
    token_ids: Tokens
    logprobs: None = None
    prompt_logprobs: Opaque = None
    pooling_output: Opaque = None
    finish_reason: int | None = None


class Row(msgspec.Struct, array_like=True, gc=False):
    """Any row, as far as the gateway reads it; elements beyond position 14 are skipped."""

    request_id: str
    token_ids: Tokens
    logprobs: Logprobs | None = None
    prompt_logprobs: Opaque = None
    pooling_output: Opaque = None
    finish_reason: int | None = None
    stop_reason: Opaque = None
    events: Opaque = None
    kv_transfer_params: Opaque = None
    shifting_9: Shifting = None
    shifting_10: Shifting = None
    shifting_11: Shifting = None
    shifting_12: Shifting = None
    shifting_13: Shifting = None
    shifting_14: Shifting = None


class SchedulerStats(msgspec.Struct):
    """The read keys of the statistics map. Requests deferred by the scheduler wait as well."""

    num_running_reqs: Opaque = None
    num_waiting_reqs: Opaque = None
    num_skipped_waiting_reqs: Opaque = 0
    kv_cache_usage: Opaque = None
    step_counter: Opaque = None
    current_wave: Opaque = None


Stats = SchedulerStats | list[Raw] | str | int | float | bool | None


class UtilityOutput(msgspec.Struct, array_like=True):
    """The reply to a utility call: call id, failure text or nil, result (not read)."""

    call_id: Opaque = None
    failure: Opaque = None


Utility = UtilityOutput | dict[str, Raw] | str | int | float | bool | None


_FINISH_REASONS: Final[dict[int | None, FinishReason]] = {
    None: "",
    0: "stop",
    1: "length",
    2: "abort",
    3: "error",
    4: "stop",  # "repetition": a stop rule of the rank's own held, what was generated is complete
}

FINISH_REASONS: Final = tuple(_FINISH_REASONS.values())
"""Of a row that goes on, then by number."""


def finish_column(reasons: list[int | None]) -> list[FinishReason]:
    """Map wire reasons; one that isn't known here ended the request for a reason we can't tell: `error`."""
    if reasons.count(None) == len(reasons):
        return [""] * len(reasons)
    return [_FINISH_REASONS.get(reason, "error") for reason in reasons]


def read_time(value: Opaque) -> float | None:
    """Read a message's time, in s of the rank's monotonic clock; None where it isn't one."""
    return value if type(value) is float and 0.0 < value < math.inf else None


def read_load(
    stats: Stats, taken_at_s: float | None, source: LoadSource = "output"
) -> tuple[EngineLoad | None, Fault | None]:
    """Read the load snapshot: (None, None) when the rank sent none, (None, fault) when it is unusable."""
    if stats is None:
        return None, None
    if type(stats) is not SchedulerStats:  # isinstance costs 0.3 us with a Struct, whose metaclass is an ABCMeta
        return None, Fault.BAD_LOAD
    running, waiting, skipped = stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs
    usage, step_counter, wave = stats.kv_cache_usage, stats.step_counter, stats.current_wave
    if not (type(running) is type(waiting) is type(skipped) is int):
        return None, Fault.BAD_LOAD
    if not (0 <= running <= MAX_UINT32 and 0 <= waiting <= MAX_UINT32 and 0 <= skipped <= MAX_UINT32):
        return None, Fault.BAD_LOAD
    if not (type(usage) is float or type(usage) is int) or not math.isfinite(usage):
        return None, Fault.BAD_LOAD
    load = EngineLoad(
        running=running,
        waiting=waiting + skipped,
        kv_usage=float(usage),
        step_counter=step_counter if type(step_counter) is int and step_counter >= 0 else None,
        wave=wave if type(wave) is int and wave > 0 else 0,
        taken_at_s=taken_at_s,
        source=source,
    )
    return load, None
