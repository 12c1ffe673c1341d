"""When a rank samples its load, how it counts, and which batches carry a report.

TokenSpeed samples before the step commits and sends load with rows only; vLLM samples after the commit
and says once, in a batch without rows, that it has run dry. Both are settings.
"""

from engine_stub.config import LoadReports
from engine_stub.scheduler import Scheduler
from engine_stub.wire.codec import Codec, Load


class LoadReporter:
    """The snapshots of one rank. `latest` is the newest sample; None before the first, and when none are sent."""

    def __init__(self, scheduler: Scheduler, settings: LoadReports, codec: Codec) -> None:
        self.latest: Load | None = None
        self._scheduler = scheduler
        self._timing = settings.snapshot or codec.default_timing
        self._is_resident = (settings.semantics or codec.default_semantics) == "resident"
        self._sends_empty = codec.default_trailing if settings.trailing is None else settings.trailing
        self._is_owed = False

    def before_commit(self) -> None:
        """A step was chosen."""
        if self._timing == "before_commit":
            self._sample()

    def after_commit(self) -> None:
        """A step has been stored."""
        if self._timing == "after_commit":
            self._sample()

    def note_change(self) -> None:
        """Something happened that the last report doesn't know."""
        self._is_owed = True

    @property
    def is_due_without_rows(self) -> bool:
        """Whether a step that had no rows sends its report all the same."""
        return self._sends_empty and self.latest is not None

    def run_dry(self) -> bool:
        """There is nothing to do: whether that is still to be said. Samples once more if so."""
        if not (self._is_owed and self._sends_empty) or self._timing == "none":
            return False
        self._is_owed = False
        self._sample()
        return True

    def _sample(self) -> None:
        """The load as the rank sees it at this moment."""
        scheduler = self._scheduler
        running, waiting = scheduler.active_count, scheduler.waiting_count
        if self._is_resident:
            running += waiting
        self.latest = Load(running, waiting, scheduler.pool.used, scheduler.pool.total)
