"""What the core wants done: the only outputs of `Router.handle`, executed by the edge in order.

Tokens never travel in effects. `Router.take_dirty()` lists the sequences whose outbox has something to
flush and the requests that have ended, in the order in which the edge passes them on, once per loop turn.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.types import EngineRequest

if TYPE_CHECKING:
    from gateway.core.errors import GatewayError
    from gateway.core.request import Request


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send this attempt's ADD to the rank. The charge is already made."""

    rank: int
    incarnation: int
    request: EngineRequest


class AbortOnRank(msgspec.Struct, frozen=True):
    """Tell the rank to stop these attempts. Their records are already released."""

    rank: int
    incarnation: int
    wire_ids: Sequence[str]


class RenewIncarnation(msgspec.Struct, frozen=True):
    """This incarnation is over, but its sockets are kept: what comes from them now belongs to the next one.

    The link answers with `RankRenewed`, unless it has found the rank lost itself.
    """

    rank: int
    incarnation: int


class ProbeRank(msgspec.Struct, frozen=True):
    """Ask a silent rank for one token that nobody waits for: an engine without work says nothing by itself."""

    rank: int
    incarnation: int
    request: EngineRequest


class StartWave(msgspec.Struct, frozen=True):
    """Make these ranks of a lockstep group step; those that are past the wave ignore it."""

    ranks: Sequence[int]
    wave: int


class RequestAccepted(msgspec.Struct, frozen=True, gc=False):
    """The request was admitted; `request.handle` names it from now on."""

    request: "Request"


class RequestRefused(msgspec.Struct, frozen=True):
    """The request was not admitted; nothing was reserved and nothing must be released."""

    error: "GatewayError"


class RequestEnded(msgspec.Struct, frozen=True, gc=False):
    """The one terminal outcome of an accepted request: `request.error` is None on success."""

    request: "Request"


class RankStateChanged(msgspec.Struct, frozen=True):
    """A rank moved in its lifecycle table."""

    rank: int
    incarnation: int
    old: str
    new: str
    cause: str


class RankRemoved(msgspec.Struct, frozen=True):
    """A rank that the configuration leaves out has nothing in flight any more: close its sockets and forget it."""

    rank: int


class AuditFound(msgspec.Struct, frozen=True):
    """The audit found something; `batches` is how many batches of the rank the gateway had seen then."""

    kind: str
    rank: int
    incarnation: int
    batches: int
    subject: str


Effect = (
    Dispatch
    | AbortOnRank
    | RenewIncarnation
    | ProbeRank
    | StartWave
    | RequestAccepted
    | RequestRefused
    | RequestEnded
    | RankStateChanged
    | RankRemoved
    | AuditFound
)
