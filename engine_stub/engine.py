"""One rank's engine without sockets and clock: inputs as frames, steps as messages to send.

A step is `begin` -> (the modelled time passes) -> `finish`. Requests that arrive in between wait in an
inbox for the next step, as in the real engines, so a load report doesn't know them yet; aborts act at
once. Terminal rows of refused requests ride on the next batch.
"""

from collections import OrderedDict
from collections.abc import Sequence as Sequences
from enum import StrEnum

from engine_stub.backend import Backend
from engine_stub.config import StubConfig
from engine_stub.faults import Faults, FaultState
from engine_stub.records import Records
from engine_stub.scheduler import Admission, ForwardOutput, Request, Rows, Scheduler, Sequence, StepPlan
from engine_stub.scheduler.sequence import Finish
from engine_stub.spoil import distorted, spoil, spoil_rows
from engine_stub.wire.codec import Abort, Add, Codec, Consequence, Load, Malformed, Problem, Utility, Wave

ABORT_MEMORY = 4096
"""Ids of early aborts that are remembered; the oldest goes first."""
ABORT_MEMORY_S = 60.0

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
    """Scheduler, model, wire and faults of one incarnation of one rank. `now` is monotonic, in s."""

    def __init__(
        self, codec: Codec, backend: Backend, config: StubConfig, index: int, records: Records, faults: Faults
    ) -> None:
        self.codec = codec
        self.scheduler = Scheduler(config.scheduler)
        self.records = records
        self.fate = Fate.ALIVE
        self._backend = backend
        self._config = config
        self._index = index
        self._fault_state = FaultState(faults)
        self._inbox: OrderedDict[str, Add] = OrderedDict()
        self._pending = Rows()
        self._plan: StepPlan | None = None
        self._output: ForwardOutput | None = None
        self._report: Load | None = None
        self._owes_report = False
        self._early_aborts: OrderedDict[str, float] = OrderedDict()
        load = config.load
        self._timing = load.snapshot or codec.default_timing
        self._semantics = load.semantics or codec.default_semantics
        self._sends_empty = codec.default_trailing if load.trailing is None else load.trailing

    @property
    def live_ids(self) -> frozenset[str]:
        """Ids that the rank holds: in the inbox, scheduled, or with a last row that is still to be sent."""
        return self.scheduler.live_ids | self._inbox.keys() | {sequence.id for sequence in self._pending.sequences}

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
            case Utility():
                return [self.codec.utility_reply(message, self._index, now)]
            case Malformed():
                self._bad(message.problem, None)
        return []

    def begin(self) -> float | None:
        """Start a step; its modelled duration in ms, or None when there is nothing to do."""
        self._drain_inbox()
        if self.faults.silent or self.fate is Fate.DEAD:
            return None
        plan = self.scheduler.plan()
        if plan is None:
            return 0.0 if self._pending.sequences else None
        if self._timing == "before_commit":
            self._report = self._sample()
        self._plan = plan
        self._output = self._backend.forward(plan)
        return self._output.duration_ms

    def finish(self, now: float) -> list[Frames]:
        """Commit the step that was begun; the messages to send."""
        rows = self._pending
        self._pending = Rows()
        if self._plan is not None and self._output is not None:
            fresh = self.scheduler.commit(self._plan, self._output)
            self._plan = self._output = None
            self.records.steps += 1
            self._count_tokens(fresh)
            if self.faults.final_without_tokens:
                self._defer_finals(fresh)
            rows = _joined(fresh, rows)
        if self._timing == "after_commit":
            self._report = self._sample()
        if not rows.sequences and not (self._sends_empty and self._report is not None):
            return []
        self._owes_report = True
        return self._encode(rows, now)

    def run_dry(self, now: float) -> list[Frames]:
        """Called when there is nothing to do: vLLM's one batch without rows after the last activity."""
        if not (self._owes_report and self._sends_empty) or self._timing == "none":
            return []
        self._owes_report = False
        self._report = self._sample()
        return self._encode(Rows(), now)

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
        """Frames of a batch that a test wrote: rows of live (or unknown) ids, and any load report.

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
            columns.add(sequence, list(tokens), finish)
            if finish:
                self.scheduler.abort(request_id)
        self._count_tokens(columns)
        self.records.batches += 1
        self.records.reported_loads.append(load)
        return self.codec.encode(columns, load, self._index, self.faults.wire or self._config.wire, now)

    # Inputs.

    def _receive_add(self, message: Add, now: float) -> None:
        request = message.request
        self.records.add(request)
        expiry = self._early_aborts.pop(request.id, None)
        if message.problem is not None:
            self._bad(message.problem, request)
            if message.problem.consequence is not Consequence.SERVED:
                return
        if expiry is not None and expiry > now:
            self._bad(Problem("the id was aborted before", Consequence.REFUSED), request, finish="abort")
        elif request.id in self._inbox:
            self._duplicate(request)
        else:
            self._inbox[request.id] = message

    def _abort(self, request_id: str, now: float) -> None:
        self.records.abort(request_id)
        if self._fault_state.ignores_abort():
            return
        self._owes_report = True
        pending = self._pending
        if self._inbox.pop(request_id, None) is not None or self.scheduler.abort(request_id):
            return
        if any(sequence.id == request_id for sequence in pending.sequences):
            self._pending = _without(pending, request_id)
        elif self.codec.remembers_aborts:
            self._early_aborts[request_id] = now + ABORT_MEMORY_S
            if len(self._early_aborts) > ABORT_MEMORY:
                self._early_aborts.popitem(last=False)

    def _drain_inbox(self) -> None:
        while self._inbox:
            _, message = self._inbox.popitem(last=False)
            request = message.request
            admission = self.scheduler.submit(request)
            if admission is Admission.REJECTED_DUPLICATE:
                self._duplicate(request)
            elif not admission.is_accepted:
                self._end_unserved(request, "abort")  # load, not the request's fault

    def _duplicate(self, request: Request) -> None:
        self._bad(Problem("the id is in flight already", self.codec.duplicate_consequence), request)

    def _bad(self, problem: Problem, request: Request | None, finish: Finish = "error") -> None:
        """Record a bad input and let it have its effect; a kind rank answers instead of dying."""
        self.records.bad_input(problem, None if request is None else request.id)
        kills = problem.consequence in (Consequence.DEAF, Consequence.MUTE, Consequence.DEAD)
        if kills and self._config.strict_vllm:
            self.fate = Fate(problem.consequence.value)
        elif request is not None and problem.consequence is not Consequence.SERVED:
            self._end_unserved(request, finish)

    def _end_unserved(self, request: Request, finish: Finish) -> None:
        self._pending.add(Sequence(request, -1), [], finish)

    # Outputs.

    def _sample(self) -> Load | None:
        """The load as the rank sees it at this moment."""
        scheduler = self.scheduler
        running, waiting = scheduler.active_count, scheduler.waiting_count
        if self._semantics == "resident":
            running += waiting
        return Load(running, waiting, scheduler.pool.used, scheduler.pool.total)

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
        faults, state = self.faults, self._fault_state
        if faults.drop_tokens_every or faults.never_final:
            spoil_rows(rows, state)
        load = None if self._timing == "none" else distorted(self._report, faults)
        index = self._index if faults.engine_index is None else faults.engine_index
        frames = self.codec.encode(rows, load, index, faults.wire or self._config.wire, now)
        self.records.batches += 1
        self.records.reported_loads.append(load)
        state.batches += 1
        messages = [frames]
        if faults.garbage_every and state.batches % faults.garbage_every == 0:
            messages = spoil(faults.garbage_kind, frames)
        if faults.duplicate_every and state.batches % faults.duplicate_every == 0:
            messages.append(frames)
        return messages


def _joined(first: Rows, second: Rows) -> Rows:
    if not second.sequences:
        return first
    return Rows(first.sequences + second.sequences, first.tokens + second.tokens, first.finishes + second.finishes)


def _without(rows: Rows, request_id: str) -> Rows:
    kept = Rows()
    for sequence, tokens, finish in zip(rows.sequences, rows.tokens, rows.finishes, strict=True):
        if sequence.id != request_id:
            kept.add(sequence, tokens, finish)
    return kept
