"""What happens to the gateway: the only inputs of `Router.handle`. Past tense, immutable.

Rank numbers are global: a group's offset + the index within the group. Times are seconds of one
monotonic clock that the edge reads; the core never asks for the time.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.config.schema import Config
from gateway.core.errors import Reason
from gateway.types import EngineBatch, EngineLoad, RankInfo, Sampling


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded client request. `sink` is the edge's own object; the core hands it back untouched.

    `client_key` names the caller within which `request_id` must be unique while live.
    `pinned_rank` is the raw number the client gave (range-checked by the core).
    `deadline_at` is absolute, in seconds of the same clock as `now`. `tenant` is whom the request is charged to.
    `cache_salt` separates cached answers; `use_cache` False neither reads nor writes the response cache.
    `allow_resume` False: what another rank would have to continue ends with the loss of its rank instead.
    `queue_timeout_s` may shorten the queue's own time-out.
    """

    client_key: str
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    n: int = 1
    model: str | None = None
    pinned_rank: int | None = None
    priority: int = 0
    deadline_at: float | None = None
    tenant: str = ""
    session_id: str = ""
    cache_salt: str = ""
    use_cache: bool = True
    allow_resume: bool | None = None
    queue_timeout_s: float | None = None
    arrived_at_unix_s: float = 0.0
    sink: Any = None


class RequestCancelled(msgspec.Struct, frozen=True):
    """A caller gave up on a live request: client cancel, disconnect, Abort, slow reader."""

    handle: int
    reason: Reason


class BatchReceived(msgspec.Struct, frozen=True, gc=False):
    """One decoded output message, or several joined ones, of one rank incarnation."""

    rank: int
    incarnation: int
    batch: EngineBatch


class LoadReported(msgspec.Struct, frozen=True):
    """A rank incarnation reported its load by itself, not along with a batch."""

    rank: int
    incarnation: int
    load: EngineLoad


class WaveReported(msgspec.Struct, frozen=True):
    """A rank of a lockstep group says that a wave is over (`complete`), or that it has begun one (`start`)."""

    rank: int
    incarnation: int
    complete: int | None = None
    start: int | None = None


class RankJoined(msgspec.Struct, frozen=True, kw_only=True):
    """A rank registered and can be addressed from now on. `reattached`: it is the process that it was, on another connection."""

    rank: int
    incarnation: int
    info: RankInfo
    reattached: bool = False


class RankLost(msgspec.Struct, frozen=True):
    """A rank's sockets are gone or it announced its end."""

    rank: int
    incarnation: int
    cause: str


class SendFailed(msgspec.Struct, frozen=True):
    """An ADD could not be handed to the rank; the attempt never started there.

    `cause` `unreachable`: the rank takes nothing until `SendUnblocked` or its next incarnation, one of which follows.
    """

    rank: int
    incarnation: int
    wire_id: str
    cause: str


class SendBlocked(msgspec.Struct, frozen=True):
    """The rank's send FIFO became non-empty: not eligible until `SendUnblocked`."""

    rank: int
    incarnation: int


class SendUnblocked(msgspec.Struct, frozen=True):
    """The rank's send FIFO drained."""

    rank: int
    incarnation: int


class RankHeard(msgspec.Struct, frozen=True):
    """A message of a rank incarnation that is no batch: its process lives."""

    rank: int
    incarnation: int


class RankRenewed(msgspec.Struct, frozen=True):
    """The link gave the rank's kept sockets a new incarnation, as `RenewIncarnation` asked."""

    rank: int
    incarnation: int


class RankDrained(msgspec.Struct, frozen=True):
    """An operator wants no new work on a rank; with `migrate`, what can move moves to other ranks at once."""

    rank: int
    migrate: bool = False


class RankUndrained(msgspec.Struct, frozen=True):
    """An operator wants the rank to take work again."""

    rank: int


class DrainStarted(msgspec.Struct, frozen=True):
    """The whole gateway drains: new requests are refused, live ones go on."""


class AbortAll(msgspec.Struct, frozen=True):
    """Grace is over: every live request ends with `reason`."""

    reason: Reason


class Reconfigured(msgspec.Struct, frozen=True):
    """Another configuration is in force, which `gateway.config.changes` has found to be a live change of the last one."""

    config: Config


class CacheFlushed(msgspec.Struct, frozen=True):
    """An operator wants every stored answer forgotten."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed. Expires deadlines, foreign load and bounded memories."""


Event = (
    RequestArrived
    | RequestCancelled
    | BatchReceived
    | LoadReported
    | WaveReported
    | RankJoined
    | RankLost
    | RankHeard
    | RankRenewed
    | SendFailed
    | SendBlocked
    | SendUnblocked
    | RankDrained
    | RankUndrained
    | DrainStarted
    | AbortAll
    | Reconfigured
    | CacheFlushed
    | Tick
)
