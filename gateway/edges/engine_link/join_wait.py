"""How long a rank that was told its addresses has not joined, and when the log says so.

An engine that can't reach its addresses says nothing: libzmq tries again for ever. Nor does one that loads its model, which
takes minutes for a large one, or one that has died. The link can't tell them apart, so it reports what it knows.
"""

import math
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from gateway.edges.engine_link.channel import Addresses

FIRST_S = 60.0
"""After the rank was told its addresses."""
AGAIN_S = 600.0
HINT = "still loading, gone, or it can't reach these addresses as its user, from its container or host"


class JoinWait:
    """Of one rank. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], log: FilteringBoundLogger) -> None:
        self._clock = clock
        self._log = log
        self._began_at = 0.0
        self._due_at = math.inf

    def begin(self) -> None:
        """The rank was told its addresses."""
        self._began_at = self._clock()
        self._due_at = self._began_at + FIRST_S

    def look(self, addresses: Addresses, *, is_ready: bool, is_registered: bool) -> None:
        """It has not joined yet: say so when it is time."""
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + AGAIN_S
        self._log.warning(
            "rank_still_joining",
            waited_s=round(now - self._began_at, 1),
            addresses=[address for address in addresses if address is not None],
            ready=is_ready,
            registered=is_registered,
            hint=HINT,
        )
