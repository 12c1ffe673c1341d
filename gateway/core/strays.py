"""Rows for requests that are not live: late ones of ours, orphans of an earlier gateway.

Neither may go on for ever: a rank that still generates for nobody is told to stop, again and again
if need be, but never more often than once per `interval_s` and id, and from a bounded memory.
"""

from collections import OrderedDict

from gateway.config.schema import Config

MAX_REMEMBERED = 4096
INTERVAL_S = 1.0


def probe_prefix(nonce: str) -> str:
    """How the ids of the gateway's own probes begin (`gateway.core.probes`)."""
    return f"{nonce}-probe-"


class Strays:
    """Decides which stray ids to abort now."""

    def __init__(self, nonce: str, settle_s: float) -> None:
        self._prefix = f"{nonce}-"
        self._probe_prefix = probe_prefix(nonce)
        self._settle_s = settle_s
        self._next_abort_at: OrderedDict[tuple[int, str], float] = OrderedDict()

    def configure(self, config: Config) -> None:
        """Go by other settings."""
        self._settle_s = config.load.abort_settle_s

    def is_ours(self, wire_id: str) -> bool:
        """Whether this gateway process made the id."""
        return wire_id.startswith(self._prefix)

    def is_probe(self, wire_id: str) -> bool:
        """Whether it is an answer to a probe, which nobody waits for."""
        return wire_id.startswith(self._probe_prefix)

    def seen(self, rank: int, wire_id: str, now: float, *, is_final: bool) -> bool:
        """Note a row. True when the rank should be told to abort the id now.

        Our own ids get `settle_s` first: their abort is usually on its way already.
        """
        key = (rank, wire_id)
        if is_final:
            self._next_abort_at.pop(key, None)
            return False
        due_at = self._next_abort_at.get(key)
        if due_at is None:
            due_at = now + self._settle_s if self.is_ours(wire_id) else now
        is_due = now >= due_at
        self._next_abort_at[key] = now + INTERVAL_S if is_due else due_at
        self._next_abort_at.move_to_end(key)
        if len(self._next_abort_at) > MAX_REMEMBERED:
            self._next_abort_at.popitem(last=False)
        return is_due

    def forget(self, rank: int) -> None:
        """The rank's engine process is a new one: it knows nothing of the old ids."""
        for key in [key for key in self._next_abort_at if key[0] == rank]:
            del self._next_abort_at[key]
