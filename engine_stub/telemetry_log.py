"""What happened inside a rank, step by step and request by request. Both are off unless configured.

`StepTimer` times the parts of a step: `schedule` (choosing it), `forward` (the model), `distribute`
(storing tokens and encoding rows; the time that a step is made to last is in none of them).

`EventLog` keeps the story of each request: refused, activated, prefill_begin and prefill_end with the
whole batch, first_token, preempted, finished. Every event has `t` (monotonic, s), `event` and `id`; the
prefill events have `ids`, because one forward serves several prompts.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from engine_stub.scheduler import PrefillChunk, Rows, StepPlan

Part = Literal["schedule", "forward", "distribute"]
PARTS: tuple[Part, ...] = ("schedule", "forward", "distribute")

LOG = logging.getLogger("engine_stub")
Event = dict[str, Any]


class StepTimer:
    """Seconds per part of a step: the last, the mean and the longest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.steps = 0
        self._clock = clock
        self._start = 0.0
        self._last = dict.fromkeys(PARTS, 0.0)
        self._total = dict.fromkeys(PARTS, 0.0)
        self._max = dict.fromkeys(PARTS, 0.0)

    def begin(self) -> None:
        """A part begins now."""
        self._start = self._clock()

    def end(self, part: Part) -> None:
        """The part that ran until now; the next one begins."""
        now = self._clock()
        spent = now - self._start
        self._start = now
        self._last[part] = spent
        self._total[part] += spent
        self._max[part] = max(self._max[part], spent)
        if part == "distribute":
            self.steps += 1

    def snapshot(self) -> dict[str, Any]:
        """JSON-safe; means are 0.0 before the first step."""
        steps = self.steps or 1
        return {
            "steps": self.steps,
            **{
                part: {"last_s": self._last[part], "avg_s": self._total[part] / steps, "max_s": self._max[part]}
                for part in PARTS
            },
        }


class EventLog:
    """The latest events of one rank, and a log line for each."""

    def __init__(self, limit: int, rank: int) -> None:
        self.events: deque[Event] = deque(maxlen=limit)
        self._rank = rank
        self._seen: set[str] = set()

    def of(self, request_id: str) -> list[Event]:
        """The story of one request, as far as it is still there, oldest first."""
        return [event for event in self.events if event.get("id") == request_id or request_id in event.get("ids", ())]

    def refused(self, request_id: str, reason: str, now: float) -> None:
        """A request was not accepted."""
        self._note("refused", now, id=request_id, reason=reason)

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step was chosen: who got a slot, and which prompts run."""
        for sequence in plan.activated:
            self._note(
                "activated",
                now,
                id=sequence.id,
                slot=sequence.slot,
                waiting_behind=plan.waiting,
                cached_tokens=sequence.cached_tokens,
                is_resumed=sequence.generated > 0,
            )
        for sequence in plan.preempted:
            self._note("preempted", now, id=sequence.id, generated=sequence.generated)
        self._prefill("prefill_begin", plan, now)

    def committed(self, plan: StepPlan, rows: Rows, now: float) -> None:
        """A step has ended."""
        self._prefill("prefill_end", plan, now)
        for sequence, finish in zip(rows.sequences, rows.finishes, strict=True):
            if sequence.id not in self._seen and sequence.generated:
                self._seen.add(sequence.id)
                self._note("first_token", now, id=sequence.id)
            if finish:
                self.ended(sequence.id, finish, sequence.generated, now)

    def ended(self, request_id: str, finish: str, generated: int, now: float) -> None:
        """A request is over, whichever way."""
        self._seen.discard(request_id)
        self._note("finished", now, id=request_id, reason=finish, generated=generated)

    def _prefill(self, name: str, plan: StepPlan, now: float) -> None:
        if plan.prefills:
            self._note(
                name,
                now,
                ids=[chunk.sequence.id for chunk in plan.prefills],
                chunks=[_chunk(chunk) for chunk in plan.prefills],
                decode_rows=plan.decode_rows,
            )

    def _note(self, name: str, now: float, **facts: Any) -> None:
        event: Event = {"t": now, "event": name, **facts}
        self.events.append(event)
        LOG.info("engine_event", extra={"rank": self._rank, "kind": name, "at": now, "facts": facts})


def _chunk(chunk: PrefillChunk) -> dict[str, Any]:
    return {"start": chunk.start, "count": chunk.count, "is_last": chunk.is_last, "slot": chunk.sequence.slot}
