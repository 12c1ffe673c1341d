"""What a family's codec does for a rank, and the messages between the two.

`Consequence` says what a real engine does with a bad input; the codec names it, the rank applies it
(and records the input either way, so that a test can assert that no rank ever saw one).
"""

from enum import StrEnum
from typing import Any, Protocol

import msgspec

from engine_stub.config import LoadSemantics, SnapshotTiming
from engine_stub.faults import WireForm
from engine_stub.scheduler.plan import Rows
from engine_stub.scheduler.sequence import Request

ADD = b"\x00"
ABORT = b"\x01"
START_DP_WAVE = b"\x02"
UTILITY = b"\x03"

SENTINEL = b"ENGINE_CORE_DEAD"
"""Raw single frame on the output socket: the sending rank is going down. It names no rank."""


class Consequence(StrEnum):
    """The fate that a bad input brings: of the request, or of the rank."""

    SERVED = "served"
    """Quietly served as something else than what was asked."""
    REFUSED = "refused"
    """Answered by a terminal row."""
    DROPPED = "dropped"
    """Logged and ignored; a request in it would never end."""
    DEAF = "deaf"
    """The rank's input stops; it finishes what it has."""
    MUTE = "mute"
    """The rank's output stops; it computes on."""
    DEAD = "dead"
    """The rank announces its death and exits."""


class Problem(msgspec.Struct, frozen=True):
    """Why an input is bad, and what it does to a real engine."""

    reason: str
    consequence: Consequence
    is_foreign: bool = False
    """It is a good request of the other family: the gateway's group speaks that one's protocol."""


class Add(msgspec.Struct, frozen=True):
    """A request; `problem` is set when it must not run (or runs as something else)."""

    request: Request
    problem: Problem | None = None
    wave: int = 0
    """The wave that the sender counts it in."""


class Abort(msgspec.Struct, frozen=True):
    """Client aborts; unknown ids are allowed."""

    ids: list[str]


class Wave(msgspec.Struct, frozen=True):
    """START_DP_WAVE of lockstep groups; independent ranks only record it."""

    wave: int
    exclude: int | None


class Utility(msgspec.Struct, frozen=True):
    """A call into the engine core: answered by one reply."""

    call_id: int
    method: str
    args: list[Any]


class Malformed(msgspec.Struct, frozen=True):
    """An input that names no request."""

    problem: Problem


Message = Add | Abort | Wave | Utility | Malformed


class Load(msgspec.Struct, frozen=True):
    """A snapshot in the terms of the sender. The counts are `Any` because a fault may send anything."""

    running: Any
    waiting: Any
    used_blocks: Any
    total_blocks: Any
    is_short: bool = False
    """Fault: leave out the last part of the report."""


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself when it registers."""

    max_model_len: int
    total_blocks: int
    block_size: int
    capacity_tokens: int
    dtype: str
    group_size: int
    index: int
    max_active: int
    token_budget: int | None
    instance_id: str
    recipe_fingerprint: str | None = None
    """Of weights and configuration; no key of the real engines, so it is left out when there is none."""
    kv_events: dict[str, Any] | None = None
    """Where the rank publishes KV events; None: nowhere."""


class Codec(Protocol):
    """One family's wire as its engine speaks it. Stateless apart from its settings."""

    registers_before_ready: bool
    has_coordinator: bool
    """Whether ranks of the family may report to a coordinator."""
    remembers_aborts: bool
    """Whether the abort of an unknown id also ends a later request of that id."""
    duplicate_consequence: Consequence
    """What a second request with an id that is in flight brings."""
    announces_shutdown: bool
    """SIGTERM: the sentinel (True), or an `abort` row for every live request (False)."""
    default_timing: SnapshotTiming
    default_semantics: LoadSemantics
    default_trailing: bool
    default_output_hwm: int

    def status(self, status: str) -> bytes:
        """The HELLO or READY map of the handshake socket."""
        ...

    def registration(self, card: RankCard) -> bytes:
        """The ready response: the one frame that registers a rank on the input socket."""
        ...

    def decode(self, frames: list[bytes]) -> Message:
        """A message of the input socket; never raises."""
        ...

    def encode(self, rows: Rows, load: Load | None, index: int, form: WireForm, now: float) -> list[bytes]:
        """Frames of one batch. `now` is the engine's monotonic clock in s."""
        ...

    def utility_reply(self, call: Utility, index: int, now: float, result: object = None) -> list[bytes]:
        """Frames that answer a utility call; without a result, what a healthy engine says by default."""
        ...
