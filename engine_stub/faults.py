"""What can go wrong with a rank, as data. Every fault is off by default and can be switched while it runs.

`Faults` is one rank's wish list (from YAML, the in-process API or the control socket); `FaultState`
keeps the counters that "every k" and "the first n" need, and starts anew when the faults are set.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Every = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
LoadFault = Literal["drop", "negative", "float", "text", "short", "overfull"]
GarbageKind = Literal["noise", "foreign_tag", "empty", "truncate", "ragged", "replace"]


class WireForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many elements the rank's batches have: older engines send shorter arrays."""

    tokenspeed_batch: Annotated[
        Literal[9, 10, 14], Meta(description="9: no engine index; 10: no load; 14: current")
    ] = 14
    vllm_batch: Annotated[Literal[8, 9], Meta(description="8: no weight version")] = 9
    vllm_row: Annotated[Literal[14, 18], Meta(description="elements of one output row")] = 18


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of one rank. Those of the handshake act at its next dial."""

    stall: Annotated[bool, Meta(description="freeze: read nothing, step never, keep the sockets")] = False
    stall_s: Annotated[Seconds | None, Meta(description="freeze for this long, then go on")] = None
    silent: Annotated[bool, Meta(description="take requests and aborts, never answer")] = False
    die_at_token: Annotated[Every | None, Meta(description="die instead of the step after this many tokens")] = None
    die_with_sentinel: Annotated[bool, Meta(description="announce the death with ENGINE_CORE_DEAD")] = False
    load: Annotated[LoadFault | None, Meta(description="what is wrong with reported load; rows stay right")] = None
    engine_index: Annotated[int | None, Meta(description="report this engine index instead of the true one")] = None
    final_without_tokens: Annotated[bool, Meta(description="the finish follows its last token in a row of its own")] = (
        False
    )
    never_final: Annotated[bool, Meta(description="finish rows lose their reason: the request never ends")] = False
    ignore_aborts: Annotated[int, Meta(ge=0, description="do not act on the first n aborted ids")] = 0
    garbage_every: Annotated[Every | None, Meta(description="every k-th batch comes with, or as, garbage")] = None
    garbage_kind: Annotated[
        GarbageKind,
        Meta(description="noise, foreign_tag, empty: one more frame; truncate, ragged, replace: the batch itself"),
    ] = "noise"
    drop_tokens_every: Annotated[Every | None, Meta(description="every k-th row loses its tokens but counts them")] = (
        None
    )
    duplicate_every: Annotated[Every | None, Meta(description="every k-th batch is sent twice")] = None
    reorder_every: Annotated[Every | None, Meta(description="every k-th batch is sent after the one that follows")] = (
        None
    )
    slow_handshake_s: Annotated[Seconds, Meta(description="wait before HELLO, and again after INIT")] = 0.0
    swap_ready: Annotated[bool, Meta(description="READY and registration in the other family's order")] = False
    ready_first: Annotated[bool, Meta(description="a READY before the HELLO")] = False
    duplicate_hello: Annotated[bool, Meta(description="HELLO twice")] = False
    wire: Annotated[WireForm | None, Meta(description="batch form of this rank; null: the group's")] = None


class FaultState:
    """A rank's faults in effect and their counters."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.tokens = 0
        self.aborts_ignored = 0
        self.rows = 0
        self.batches = 0

    @property
    def is_dying(self) -> bool:
        """Whether `die_at_token` has been reached since the faults were set."""
        limit = self.faults.die_at_token
        return limit is not None and self.tokens >= limit

    def ignores_abort(self) -> bool:
        """Whether the next aborted id is ignored; counts it."""
        if self.aborts_ignored >= self.faults.ignore_aborts:
            return False
        self.aborts_ignored += 1
        return True


def changed(faults: Faults, changes: Mapping[str, object]) -> Faults:
    """`faults` with some fields replaced, checked; raises msgspec.ValidationError with the field's path."""
    return msgspec.convert({**msgspec.structs.asdict(faults), **changes}, Faults, strict=True)
