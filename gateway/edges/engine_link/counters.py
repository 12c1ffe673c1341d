"""What the link counted: plain integers, and dicts whose number of keys is bounded."""

from collections.abc import Callable
from typing import Any

from gateway.wire.common import Fault, Noise

OTHER = "other"


class BoundedCounts(dict[str, int]):
    """Counts by reason. Reasons that were not declared share one key, so a peer can't grow it."""

    def __init__(self, *reasons: str) -> None:
        super().__init__()
        self.reasons = reasons

    def add(self, reason: str) -> None:
        """Count one more of `reason`."""
        key = reason if reason in self.reasons else OTHER
        self[key] = self.get(key, 0) + 1


class LinkCounters:
    """Totals since start over all ranks. What is in the batches is the core's to count.

    The metrics export these under their own names; `gateway.edges.metrics_catalogue` says what each means.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.controls = 0
        self.reports = 0
        self.early_frames = 0
        self.index_mismatch = 0
        self.adds = 0
        self.aborted_ids = 0
        self.aborts_dropped = 0
        self.send_blocked = 0
        self.noise = BoundedCounts(*Noise, "foreign_identity", "unexpected_input")
        self.faults = BoundedCounts(*Fault)
        self.load_faults = BoundedCounts(*Fault)
        self.handshakes = BoundedCounts(
            *("hello", "ready", "registered", "joined", "reattached", "renewed"),
            *("duplicate_hello", "held", "held_again", "no_sockets", "init_undeliverable", "broken_off"),
            *("oversized", "bad_identity", "unknown_index", "garbage", "unexpected_ready", "bad_registration"),
        )
        self.lost = BoundedCounts("disconnected", "sentinel", "unreachable", "replaced")
        self.send_failed = BoundedCounts("unreachable", "overflow", "encode")
        self.state_faults = BoundedCounts("corrupt", "foreign", "not_restored", "not_written")


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
