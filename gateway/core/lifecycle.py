"""The life of an accepted request as one table, and what may end an in-flight record.

`settled` means that its outcome is known and nothing of it is charged any more; `ended` that its answer has left in
the order that was asked for. Without `ordering: preserve` the two come together. Both are final: whatever is said of
the request later is counted and changes nothing.
"""

from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """Where a request is in its life."""

    ACCEPTED = 0
    QUEUED = 1
    IN_FLIGHT = 2
    STREAMING = 3
    SETTLED = 4
    ENDED = 5

    # Enum's own hash is a Python function, and these are looked up several times per request. For the same reason hot
    # paths keep the members that they need in globals: `Phase.X` takes longer than a call.
    __hash__ = int.__hash__


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # To SETTLED at once: answered from the response cache.
    Phase.ACCEPTED: frozenset({Phase.QUEUED, Phase.IN_FLIGHT, Phase.SETTLED}),
    Phase.QUEUED: frozenset({Phase.IN_FLIGHT, Phase.SETTLED}),
    # To SETTLED without a token: refused, lost, or a final row that carried none.
    Phase.IN_FLIGHT: frozenset({Phase.STREAMING, Phase.SETTLED}),
    Phase.STREAMING: frozenset({Phase.SETTLED}),
    Phase.SETTLED: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""All legal steps. With n > 1 the phase is that of the sequence that is furthest."""


class Evidence(StrEnum):
    """On what a charge was given back, strongest first: what the engine said, what the link said, what time said."""

    __hash__ = str.__hash__

    ENGINE = "engine"
    """A row of this incarnation ended the attempt."""
    RANK_LOST = "rank_lost"
    """The incarnation is gone, and with it all that it ran."""
    UNSENT = "unsent"
    """The attempt never left the gateway."""
    CALLER = "caller"
    """The caller gave up; the rank was told to abort."""
    DEADLINE = "deadline"
    """The request's time was over; the rank was told to abort."""
    GATEWAY = "gateway"
    """The gateway ended it (drain, slow reader, a sibling's failure); the rank was told to abort."""
