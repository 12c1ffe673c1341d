"""TokenSpeed's output message, `BatchTokenIDOutSlim`, and the meaning of its cells.

Layout after tokenspeed 0.1.1, position 0 being the tag: rids, output_ids, finished_reasons,
prompt_tokens, completion_tokens, cached_tokens, logprob values, logprob ids (the oldest form, 9
elements), engine_index (10), num_running, num_waiting, kv_active_pages, kv_total_pages (14). Fields
are only ever appended; longer arrays are read up to what is known here.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from gateway.types import EngineLoad, FinishReason, TokenLogprob
from gateway.wire.common import Fault, Opaque, as_count

TAG: Final = "BatchTokenIDOutSlim"
FIRST_TAIL_POSITION: Final = 9

_FINISH_REASONS: Final = frozenset({"", "stop", "length", "abort", "error"})


class Tail(NamedTuple):
    """Everything after the columns, as found: the sender's index and its load snapshot.

    A field that is absent or that can't be decoded at all differ: 0 and None.
    """

    engine_index: Opaque = None
    num_running: Opaque = 0
    num_waiting: Opaque = 0
    kv_active_pages: Opaque = 0
    kv_total_pages: Opaque = 0


def finish_column(reasons: list[str]) -> Sequence[FinishReason]:
    """Map wire reasons; one that isn't known here ended the request for a reason we can't tell: `error`."""
    if not _FINISH_REASONS.issuperset(reasons):
        reasons = [reason if reason in _FINISH_REASONS else "error" for reason in reasons]
    return cast("list[FinishReason]", reasons)


def row_logprobs(values: list[float], token_count: int) -> list[TokenLogprob] | None:
    """Return the logprobs of one row's new tokens, None if none came. Raises ValueError on a mismatch."""
    if not values:
        return None
    if len(values) != token_count:
        raise ValueError("as many logprobs as tokens, or none")
    return [TokenLogprob(value) for value in values]


def read_tail(tail: Tail) -> tuple[int | None, EngineLoad | None, Fault | None]:
    """Return (engine index, load, fault); what can't be used is None and only then there is a fault.

    No snapshot at all is no fault: total pages 0 is how a rank says so, it never means an empty
    cache. `num_running` counts resident requests, the waiting ones included: passed on as it is.
    """
    engine_index = as_count(tail.engine_index)
    fault = None if engine_index is not None or tail.engine_index is None else Fault.BAD_ENGINE_INDEX
    running, waiting = as_count(tail.num_running), as_count(tail.num_waiting)
    active, total = as_count(tail.kv_active_pages), as_count(tail.kv_total_pages)
    if running is None or waiting is None or active is None or total is None:
        return engine_index, None, Fault.BAD_LOAD
    if total == 0:
        return engine_index, None, fault
    load = EngineLoad(running=running, waiting=waiting, kv_usage=active / total, kv_total_pages=total)
    return engine_index, load, fault
