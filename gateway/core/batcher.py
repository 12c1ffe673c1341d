"""Which of the queued sequences go to a rank together, and when.

Rules:

* A batch is a prefix of the service order: the first entry that does not fit closes it. Skipping it would let a stream
  of small requests starve a large one.
* The head is exempt from the bounds on tokens and predicted time: alone it can only go as it is.
* An idle rank gets what there is at once. Only a busy one is worth waiting for, and no longer than the window of the
  *oldest* entry in the batch: anchored at the head, a stream of newcomers that sort first would renew it for ever.
* Forming reads. It moves, marks and charges nothing, so a caller that drops the result has lost nothing.

A member is a sequence: a request with n > 1 has n entries, and they may go in different batches.
"""

import math
from collections.abc import Callable, Iterable
from enum import StrEnum

from gateway.config.scheduling import Batch
from gateway.core.entry import Entry
from gateway.core.predictor import Predictor

Fits = Callable[[Entry, int], bool]
"""`fits(entry, tokens)`: whether the rank takes `entry` on top of `tokens` prompt tokens of this batch."""


class BatchReason(StrEnum):
    """Why a batch went when it did and as large as it was."""

    # Enum's own hash is a Python function, and every batch is counted by its reason.
    __hash__ = str.__hash__

    BATCH_FULL = "batch_full"
    """`max_requests` members."""
    PREFERRED_SIZE = "preferred_size"
    """The largest of `preferred_sizes` that was there."""
    WINDOW = "window"
    """The oldest member had waited for `window_ms`."""
    IDLE_RANK = "idle_rank"
    """Nothing was in flight on the rank."""
    PREDICTED_CAP = "predicted_cap"
    """One more would have taken longer than `max_predicted_ms`, or the head alone does."""
    TOKEN_CAP = "token_cap"  # noqa: S105 - not a secret
    """One more would have exceeded `max_tokens` or `max_padded_tokens`."""
    CLOSED = "closed"
    """The rank could not take the next one."""


_PREFERRED_SIZE, _WINDOW, _IDLE_RANK = BatchReason.PREFERRED_SIZE, BatchReason.WINDOW, BatchReason.IDLE_RANK


class Formed:
    """A batch that may go now: its entries in service order and their predicted prefill in microseconds."""

    __slots__ = ("entries", "predicted_us", "reason")

    def __init__(self, entries: list[Entry], reason: BatchReason, predicted_us: int) -> None:
        self.entries = entries
        self.reason = reason
        self.predicted_us = predicted_us


class _Pick:
    """A prefix of the service order while it grows. `preferred` is the largest preferred size that it reached."""

    __slots__ = ("closed", "entries", "longest", "members", "oldest_at", "preferred", "tokens")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.members: list[tuple[int, int]] = []
        self.tokens = 0
        self.longest = 0
        self.oldest_at = math.inf
        self.preferred = 0
        self.closed: BatchReason | None = None

    def take(self, entry: Entry) -> None:
        prompt_tokens = entry.prompt_tokens
        self.entries.append(entry)
        self.members.append((prompt_tokens, 0))
        self.tokens += prompt_tokens
        self.longest = max(self.longest, prompt_tokens)
        self.oldest_at = min(self.oldest_at, entry.enqueued_at)


class BatchFormer:
    """Forms batches for any rank; keeps no state of its own. A preferred size above `max_requests` is never reached."""

    def __init__(self, settings: Batch, predictor: Predictor) -> None:
        self._predictor = predictor
        self._max_requests = settings.max_requests
        self._max_tokens = _or_inf(settings.max_tokens)
        self._max_padded_tokens = _or_inf(settings.max_padded_tokens)
        self._max_predicted_us = _or_inf(settings.max_predicted_ms) * 1000
        self._window_s = settings.window_ms / 1000
        self._preferred = frozenset(settings.preferred_sizes)
        self._largest_preferred = max(self._preferred, default=0)

    def form(self, entries: Iterable[Entry], now: float, *, is_idle: bool, fits: Fits) -> Formed | None:
        """The batch that goes to the rank now; None when there is none yet.

        `entries` are in service order and may all go to this rank; no more of them are read than needed. The rank must
        be able to take the first one: `fits` is asked about the others. `is_idle` says that the rank has nothing in
        flight. A batch of two or more is never predicted to take longer than `max_predicted_ms`.
        """
        pick = self._scan(entries, now, fits)
        reason = self._reason(pick, now, is_idle=is_idle)
        if reason is None:
            return None
        if reason is _PREFERRED_SIZE:
            del pick.entries[pick.preferred :]
            del pick.members[pick.preferred :]
        return Formed(pick.entries, reason, self._predictor.batch_us(pick.members))

    def next_due(self, entries: Iterable[Entry], now: float) -> float | None:
        """When `form` will let the first of `entries` go to a busy rank, if nobody joins them; None without entries.

        In seconds of the core's clock: `now` when nothing keeps them. What the rank itself can take is not asked.
        """
        pick = self._scan(entries, now, None)
        if not pick.entries:
            return None
        return now if self._reason(pick, now, is_idle=False) else pick.oldest_at + self._window_s

    def _scan(self, entries: Iterable[Entry], now: float, fits: Fits | None) -> _Pick:
        pick = _Pick()
        for entry in entries:
            if pick.entries:
                pick.closed = self._refusal(pick, entry, fits)
                if pick.closed:
                    break
            pick.take(entry)
            if self._is_complete(pick, now):
                break
        return pick

    def _refusal(self, pick: _Pick, entry: Entry, fits: Fits | None) -> BatchReason | None:
        """Why `entry` cannot join. The rank is asked before the predictor, which costs the most."""
        longest = max(pick.longest, entry.prompt_tokens)
        if pick.tokens + entry.prompt_tokens > self._max_tokens:
            return BatchReason.TOKEN_CAP
        if longest * (len(pick.entries) + 1) > self._max_padded_tokens:
            return BatchReason.TOKEN_CAP
        if fits is not None and not fits(entry, pick.tokens):
            return BatchReason.CLOSED
        if self._is_too_long(pick, entry):
            return BatchReason.PREDICTED_CAP
        return None

    def _is_complete(self, pick: _Pick, now: float) -> bool:
        """Whether to look no further: nobody else can join, or the largest preferred size is there in time."""
        count = len(pick.entries)
        if count in self._preferred:
            pick.preferred = count
        if count >= self._max_requests:
            pick.closed = BatchReason.BATCH_FULL
        elif pick.tokens >= self._max_tokens or pick.longest * (count + 1) > self._max_padded_tokens:
            pick.closed = BatchReason.TOKEN_CAP
        elif count == 1 and self._is_too_long(pick):
            pick.closed = BatchReason.PREDICTED_CAP
        return pick.closed is not None or (count == self._largest_preferred and not self._is_overdue(pick, now))

    def _reason(self, pick: _Pick, now: float, *, is_idle: bool) -> BatchReason | None:
        """Why what was picked may go now. Preferred sizes save time; they do not count once time is up."""
        if not pick.entries:
            return None
        is_overdue = self._is_overdue(pick, now)
        if pick.preferred and not is_overdue and pick.preferred < self._max_requests:
            return _PREFERRED_SIZE
        if pick.closed is not None:
            return pick.closed
        if is_idle:
            return _IDLE_RANK
        return _WINDOW if is_overdue or not self._window_s else None

    def _is_too_long(self, pick: _Pick, *more: Entry) -> bool:
        if self._max_predicted_us == math.inf:
            return False
        members = pick.members + [(entry.prompt_tokens, 0) for entry in more]
        return self._predictor.batch_us(members) > self._max_predicted_us

    def _is_overdue(self, pick: _Pick, now: float) -> bool:
        # The same sum as in next_due, so that a timer set by it finds the batch due. No window: nothing is late.
        return self._window_s > 0 and now >= pick.oldest_at + self._window_s


def _or_inf(bound: float | None) -> float:
    return math.inf if bound is None else bound
