"""One rank's engine without sockets and clock: inputs as frames, steps as messages to send.

A step is `begin` -> (the modelled time passes) -> `finish`. Requests that arrive in between wait in an
inbox for the next step, as in the real engines, so a snapshot doesn't know them yet; aborts act at
once. Terminal rows of refused requests ride on the next batch.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from enum import StrEnum
from typing import Any

from engine_stub import forwarding
from engine_stub.backend import Backend
from engine_stub.config import StubConfig
from engine_stub.emitting import Emitter
from engine_stub.failures import FailureLog
from engine_stub.faults import Faults, FaultState
from engine_stub.inbox import Inbox
from engine_stub.records import Records
from engine_stub.reporting import LoadReporter
from engine_stub.scheduler import Admission, CacheEvent, ForwardOutput, Request, Rows, Scheduler, Sequence, StepPlan
from engine_stub.scheduler.sequence import Finish
from engine_stub.spoil import distorted
from engine_stub.telemetry import Telemetry
from engine_stub.telemetry_log import EventLog, StepTimer
from engine_stub.wire.codec import Abort, Add, Codec, Consequence, Load, Malformed, Problem, Utility, Wave

LOG = logging.getLogger("engine_stub")
Frames = list[bytes]
ScriptedRow = tuple[str, list[int], Finish]
"""(id, new tokens, finish) of a batch that a test writes."""


class Fate(StrEnum):
    """What a bad input left of the rank."""

    ALIVE = "alive"
    DEAF = "deaf"
    MUTE = "mute"
    DEAD = "dead"


class RankEngine:
    """Scheduler, model, wire and faults of one incarnation of one rank. `now` is monotonic, in s.

    `clock` is read only where nobody passes `now`: for step timing, and when the engine is asked
    between steps.
    """

    def __init__(
        self,
        codec: Codec,
        backend: Backend,
        config: StubConfig,
        index: int,
        records: Records,
        faults: Faults,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.codec = codec
        self.scheduler = Scheduler(config.scheduler, records_cache_events=config.kv_events.endpoint is not None)
        self.backend = backend
        self.records = records
        self.fate = Fate.ALIVE
        self.clients = 1
        """Front ends that it is connected to."""
        settings = config.telemetry
        self.telemetry = Telemetry(self.scheduler, backend.info, interval_s=settings.rate_interval_s, now=clock())
        self.timer = StepTimer(clock) if settings.step_timing else None
        self.log = EventLog(settings.event_limit, index) if settings.event_log else None
        self._failures = FailureLog(index, clock)
        self._clock = clock
        self._config = config
        self._index = index
        self._fault_state = FaultState(faults)
        self._inbox = Inbox()
        self._emitter = Emitter(codec, index, config.wire, records)
        self._pending = Rows()
        self._plan: StepPlan | None = None
        self._output: ForwardOutput | None = None
        self._load = LoadReporter(self.scheduler, config.load, codec)
        self._waves: list[Wave | int] = []

    @property
    def live_ids(self) -> frozenset[str]:
        """Ids that the rank holds: in the inbox, scheduled, or with a last row that is still to be sent."""
        return self.scheduler.live_ids | self._inbox.ids | {sequence.id for sequence in self._pending.sequences}

    @property
    def faults(self) -> Faults:
        """The faults in effect; setting them restarts their counters."""
        return self._fault_state.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._fault_state = FaultState(faults)

    @property
    def is_dying(self) -> bool:
        """Whether the rank dies instead of its next step."""
        return self._fault_state.is_dying

    def report(self) -> dict[str, Any]:
        """Telemetry, JSON-safe; `step_timing` is None when it isn't measured."""
        return {
            **self.telemetry.snapshot(self._clock()),
            "step_timing": None if self.timer is None else self.timer.snapshot(),
        }

    def take_cache_events(self) -> list[CacheEvent]:
        """What has changed in the prefix cache since the last call; always empty unless events are published."""
        prefix = self.scheduler.kv.prefix
        if prefix is None or not prefix.events:
            return []
        events, prefix.events = prefix.events, []
        return events

    def receive(self, frames: Frames, now: float) -> list[Frames]:
        """Take one message of the input socket; returns messages to send at once (utility replies)."""
        message = self.codec.decode(frames)
        match message:
            case Add():
                self._receive_add(message, now)
            case Abort():
                for request_id in message.ids:
                    self._abort(request_id, now)
            case Wave():
                self.records.received_waves.append(message)
                self._note_wave(message)
            case Utility():
                result = self.scheduler.reset_prefix_cache() if message.method == "reset_prefix_cache" else None
                return [self.codec.utility_reply(message, self._index, now, result)]
            case Malformed():
                self._bad(message.problem, None)
        return []

    def take_waves(self) -> list[Wave | int]:
        """Starts of waves, and the waves of requests, in the order in which they arrived since the last call."""
        waves, self._waves = self._waves, []
        return waves

    @property
    def is_unfinished(self) -> bool:
        """Whether the scheduler has requests, or rows are still to be sent; the inbox is for the next step."""
        return bool(self.scheduler.live_count or self._pending.sequences)

    @property
    def load_now(self) -> Load | None:
        """The load for a report to the coordinator, as the faults want it; None: there is none."""
        if self._config.load.snapshot == "none":
            return None
        scheduler = self.scheduler
        load = Load(scheduler.active_count, scheduler.waiting_count, scheduler.pool.used, scheduler.pool.total)
        return distorted(load, self.faults)

    def begin(self) -> float | None:
        """Start a step; its modelled duration in ms, or None when there is nothing to do."""
        if self.timer is not None:
            self.timer.begin()
        self._drain_inbox()
        if self.faults.silent or self.fate is Fate.DEAD:
            return None
        plan = self.scheduler.plan()
        if plan is None:
            return 0.0 if self._pending.sequences else None
        if self.timer is not None:
            self.timer.end("schedule")
        if self.log is not None:
            self.log.planned(plan, self._clock())
        self._load.before_commit()
        self._forward(plan)
        if self.timer is not None:
            self.timer.end("forward")
        return 0.0 if self._output is None else self._output.duration_ms

    def finish(self, now: float) -> list[Frames]:
        """Commit the step that was begun; the messages to send."""
        is_step = self._plan is not None
        if self.timer is not None:
            self.timer.begin()
        rows, self._pending = self._pending, Rows()
        if self._plan is not None and self._output is not None:
            rows = self._commit(self._plan, self._output, now).followed_by(rows)
            self._plan = self._output = None
        self._load.after_commit()
        messages: list[Frames] = []
        if rows.sequences or self._load.is_due_without_rows:
            self._load.note_change()
            messages = self._encode(rows, now)
        if self.timer is not None and is_step:
            self.timer.end("distribute")
        return messages

    def run_dry(self, now: float) -> list[Frames]:
        """Called when there is nothing to do: vLLM's one batch without rows after the last activity."""
        messages = self._encode(Rows(), now) if self._load.run_dry() else []
        return messages + self._emitter.flush()

    def abort_all(self, now: float) -> list[Frames]:
        """End everything with an `abort` row, as vLLM does on SIGTERM."""
        self._drain_inbox()
        for request_id in sorted(self.scheduler.live_ids):
            sequence = self.scheduler.sequence(request_id)
            assert sequence is not None
            self.scheduler.abort(request_id)
            self._pending.add(sequence, [], "abort")
        rows, self._pending = self._pending, Rows()
        return self._encode(rows, now) if rows.sequences else []

    def scripted(self, rows: Sequences[ScriptedRow], load: Load | None, now: float) -> Frames:
        """Frames of a batch that a test wrote: rows of live (or unknown) ids, and any snapshot.

        Tokens count as generated, a finish ends the request. Faults don't apply.
        """
        self._drain_inbox()
        columns = Rows()
        for request_id, tokens, finish in rows:
            sequence = self.scheduler.sequence(request_id)
            if sequence is None:
                sequence = Sequence(Request(id=request_id, prompt_ids=(), max_tokens=1), -1)
            sequence.output += tokens
            sequence.generated += len(tokens)
            sequence.reported = sequence.generated
            columns.add(sequence, list(tokens), finish)
            if finish:
                self.scheduler.abort(request_id)
        self._count_tokens(columns)
        return self._emitter.scripted(columns, load, self._fault_state, now)

    # Steps.

    def _forward(self, plan: StepPlan) -> None:
        """Compute a step; what fails in it ends with `error` rows."""
        outcome = forwarding.run(self.backend, plan)
        self._plan, self._output = outcome.plan, outcome.output
        if outcome.failed is not None:
            failed = self.scheduler.fail(outcome.failed)
            ids = [sequence.id for sequence in failed.sequences]
            LOG.error("forward_failed", exc_info=outcome.error, extra={"engine_index": self._index, "ids": ids})
            self._pending = self._pending.followed_by(failed)
            if self.log is not None:
                self.log.committed(outcome.failed, failed, self._clock())

    def _commit(self, plan: StepPlan, output: ForwardOutput, now: float) -> Rows:
        rows = self.scheduler.commit(plan, output)
        self.records.steps += 1
        self.telemetry.observe(plan, now)
        self._count_tokens(rows)
        if self.log is not None:
            self.log.committed(plan, rows, now)
        if "cache_miss" in rows.finishes:
            ids = [row.id for row, finish in zip(rows.sequences, rows.finishes, strict=True) if finish == "cache_miss"]
            LOG.info("cache_miss", extra={"engine_index": self._index, "ids": ids})
        if self.faults.final_without_tokens:
            self._defer_finals(rows)
        return rows

    # Inputs.

    def _note_wave(self, wave: Wave | int) -> None:
        if self._config.lockstep:
            self._waves.append(wave)

    def _receive_add(self, message: Add, now: float) -> None:
        request = message.request
        self.records.add(request)
        self.records.received_add_waves.append(message.wave)
        self._note_wave(message.wave)
        was_aborted = self._inbox.was_aborted(request.id, now)
        if request.client >= self.clients:
            self._bad(Problem(f"client index {request.client} has no output socket", Consequence.MUTE), request)
            return
        if message.problem is not None:
            self._bad(message.problem, request)
            if message.problem.consequence is not Consequence.SERVED:
                return
        if was_aborted:
            self._bad(Problem("the id was aborted before", Consequence.REFUSED), request, finish="abort")
        elif request.id in self._inbox.ids:
            self.scheduler.admissions[Admission.REJECTED_DUPLICATE] += 1
            self._refuse(request, Admission.REJECTED_DUPLICATE)
        else:
            self._inbox.put(message)

    def _abort(self, request_id: str, now: float) -> None:
        self.records.abort(request_id)
        if self._fault_state.ignores_abort():
            return
        self._load.note_change()
        sequence = self.scheduler.sequence(request_id)
        if self._inbox.remove(request_id) or self.scheduler.abort(request_id):
            if self.log is not None:
                self.log.ended(request_id, "abort", 0 if sequence is None else sequence.generated, now)
        elif any(sequence.id == request_id for sequence in self._pending.sequences):
            self._pending = self._pending.without(request_id)
        elif self.codec.remembers_aborts:
            self._inbox.remember_abort(request_id, now)

    def _drain_inbox(self) -> None:
        for message in self._inbox.drain():
            admission = self.scheduler.submit(message.request)
            if not admission.is_accepted:
                self._refuse(message.request, admission)

    def _refuse(self, request: Request, admission: Admission) -> None:
        """End a request that admission refused: `abort` when a retry may help, `error` when it never will.

        A duplicate is the sender's fault beside that, and may cost more than the request.
        """
        self.records.refuse(request.id, admission)
        LOG.info("request_refused", extra={"engine_index": self._index, "id": request.id, "reason": admission.value})
        if self.log is not None:
            self.log.refused(request.id, admission.value, self._clock())
        if admission is Admission.REJECTED_DUPLICATE:
            problem = Problem("the id is in flight already", self.codec.duplicate_consequence)
            self._bad(problem, request, reason=admission.value)
        else:
            is_transient = admission is Admission.REJECTED_QUEUE_FULL
            self._end_unserved(request, "abort" if is_transient else "error", admission.value)

    def _bad(
        self, problem: Problem, request: Request | None, finish: Finish = "error", reason: str | None = None
    ) -> None:
        """Record a bad input and let it have its effect; a kind rank answers instead of dying."""
        request_id = None if request is None else request.id
        self.records.bad_input(problem, request_id)
        # What admission gave a reason for is logged as refused, and an abort is nobody's failure.
        if reason is None and finish == "error" and problem.consequence is not Consequence.SERVED:
            self._failures.note(request_id, problem)
        kills = problem.consequence in (Consequence.DEAF, Consequence.MUTE, Consequence.DEAD)
        if kills and self._config.strict_vllm:
            self.fate = Fate(problem.consequence.value)
        elif request is not None and problem.consequence is not Consequence.SERVED:
            self._end_unserved(request, finish, reason)

    def _end_unserved(self, request: Request, finish: Finish, reason: str | None = None) -> None:
        sequence = Sequence(request, -1)
        sequence.reason = reason
        self._pending.add(sequence, [], finish)

    # Outputs.

    def _count_tokens(self, rows: Rows) -> None:
        count = sum([len(tokens) for tokens in rows.tokens])
        self.records.tokens += count
        self._fault_state.tokens += count

    def _defer_finals(self, rows: Rows) -> None:
        """Move every finish into a row without tokens of the next batch."""
        for position, finish in enumerate(rows.finishes):
            if finish:
                self._pending.add(rows.sequences[position], [], finish)
                rows.finishes[position] = ""

    def _encode(self, rows: Rows, now: float) -> list[Frames]:
        return self._emitter.batch(rows, self._load.latest, self._fault_state, now)
