"""What the link counted: plain integers, and dicts whose number of keys is bounded."""

from collections.abc import Callable
from typing import Any

MAX_KEYS = 32
OTHER = "other"


class BoundedCounts(dict[str, int]):
    """Counts by reason. Reasons beyond the first `MAX_KEYS` share one key, so a peer can't grow it."""

    def add(self, key: str, amount: int = 1) -> None:
        """Count `amount` more of `key`."""
        if key not in self and len(self) >= MAX_KEYS:
            key = OTHER
        self[key] = self.get(key, 0) + amount


class LinkCounters:
    """Totals since start over all ranks.

    What is in the batches is the core's to count. The metrics export these under their own names, with the meanings of
    `gateway.edges.metrics_catalogue`.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.controls = 0
        self.early_frames = 0
        self.index_mismatch = 0
        self.noise = BoundedCounts()
        self.faults = BoundedCounts()
        self.load_faults = BoundedCounts()
        self.handshakes = BoundedCounts()
        self.lost = BoundedCounts()
        self.adds = 0
        self.aborted_ids = 0
        self.aborts_dropped = 0
        self.send_blocked = 0
        self.send_failed = BoundedCounts()
        self.state_faults = BoundedCounts()


class LimitedLog:
    """Logs an event at most once per `interval_s`; the next line says how many were left out.

    For lines that a peer can provoke. The limit is per event and rank: a noisy rank hides no other's lines. Event names
    are constants of this package, so the memory is bounded.
    """

    def __init__(self, log: Any, clock: Callable[[], float], interval_s: float = 5.0) -> None:
        self._log = log
        self._clock = clock
        self._interval_s = interval_s
        self._seen: dict[tuple[str, object], tuple[float, int]] = {}

    def warning(self, event: str, **facts: object) -> None:
        """Log, or remember that a line was left out."""
        now = self._clock()
        key = (event, facts.get("rank"))
        last, suppressed = self._seen.get(key, (None, 0))
        if last is not None and now - last < self._interval_s:
            self._seen[key] = (last, suppressed + 1)
            return
        self._seen[key] = (now, 0)
        if suppressed:
            facts["suppressed"] = suppressed
        self._log.warning(event, **facts)
