"""The tick machine: decode first, then bounded prefill; paged KV; abort at any moment.

One step is `plan()` -> the model's `forward(plan)` -> `commit(plan, output)`. Between the two calls
requests may be submitted and aborted: an abort frees its blocks at once and `commit` skips its row.
Rules that the tests hold it to:

* every decoding sequence gets a row in every step while the decode set fits the caps; when it doesn't,
  the set rotates so that nobody starves;
* a sequence prefilled in one step first decodes in the next; the last prefill chunk yields a token, a
  chunk before it yields nothing;
* a slot freed in one step is filled at the start of the next; joins are FIFO;
* scheduled tokens never exceed the token budget; used blocks never exceed the pool;
* a preempted sequence keeps its output, rejoins at the head of the queue and recomputes its text; a
  step that preempted starts nothing new (otherwise the newcomers are the next victims).
"""

from collections import Counter

from engine_stub.scheduler.admission import never_fits, place_for
from engine_stub.scheduler.chunks import choose_chunks
from engine_stub.scheduler.config import SchedulerConfig
from engine_stub.scheduler.kv import KvStore
from engine_stub.scheduler.places import Places
from engine_stub.scheduler.plan import Admission, ForwardOutput, Rows, StepPlan, TopLogprobs
from engine_stub.scheduler.sequence import Finish, Phase, Request, Sequence

# Plain names: an enum attribute costs a metaclass lookup, and these are read for every row.
_DECODING = Phase.DECODING
_PREFILLING = Phase.PREFILLING


class Scheduler:
    """One rank's queue, slots and KV pool. Pure; single-threaded."""

    def __init__(self, config: SchedulerConfig, *, records_cache_events: bool = False) -> None:
        self.config = config
        self.kv = KvStore(config, records_events=records_cache_events)
        self.pool = self.kv.pool
        self.steps = 0
        self.short_cuts = 0
        self.preemptions = 0
        self.admissions: Counter[Admission] = Counter()
        self.finishes: Counter[Finish] = Counter()
        self._places = Places()
        self._evicted: list[Sequence] = []
        self._activated: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._submitted = 0
        self._rotation = 0
        self._hold = config.hold_until_queued
        self._active_cap = config.active_cap
        self._starts_at_prefill = config.kv_admission == "single"
        self._has_preempted = False
        self._is_head_blocked = False
        self._has_lost_rows = False
        caps = [cap for cap in (config.max_batch_size, config.token_budget) if cap is not None]
        self._max_decodes = min(caps) if caps else config.max_active

    @property
    def live_ids(self) -> frozenset[str]:
        """Ids that are waiting, prefilling or decoding."""
        return frozenset(self._places.live)

    @property
    def live_count(self) -> int:
        """How many sequences are live."""
        return len(self._places.live)

    @property
    def active_count(self) -> int:
        """Sequences that hold a slot."""
        return self._places.active_count

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for a slot, preempted ones included."""
        return len(self._places.waiting)

    def sequence(self, request_id: str) -> Sequence | None:
        """The live sequence of an id."""
        return self._places.live.get(request_id)

    def submit(self, request: Request) -> Admission:
        """Accept a request or say why not; a refused one leaves no trace but its count."""
        admission = self._judge(request)
        self.admissions[admission] += 1
        if admission.is_accepted:
            self._places.enter(Sequence(request, self._submitted))
            self._submitted += 1
            if self._starts_at_prefill and admission is Admission.ADMITTED and not self.config.recycle_batch:
                self._promote()
        return admission

    def abort(self, request_id: str) -> bool:
        """End a live request now and free its blocks; False for an unknown id (idempotent)."""
        sequence = self.sequence(request_id)
        if sequence is None:
            return False
        self._end(sequence, "abort")
        return True

    def fail(self, plan: StepPlan) -> Rows:
        """End what a failed step would have computed, each with an `error` row; everything else goes on."""
        rows = self._start_rows()
        for sequence in [*plan.decodes, *(chunk.sequence for chunk in plan.prefills)]:
            if sequence.phase in (_DECODING, _PREFILLING):
                self._end(sequence, "error")
                rows.add(sequence, sequence.unreported(), "error")
        return rows

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while sequences hold KV."""
        return self.kv.prefix is None or self.kv.prefix.reset(self.pool)

    def plan(self) -> StepPlan | None:
        """Choose the next step; None when there is nothing to run. Takes the blocks that the step writes."""
        places, config = self._places, self.config
        self._has_preempted = self._has_lost_rows = False
        if not places.live:
            places.slots.end_batch()
            self._activated.clear()
        if len(places.decoding) == 1 == len(places.live) and not config.force_batched:
            return self._plan_alone()
        decodes = self._plan_decodes()
        while not decodes and self._has_preempted and places.decoding:
            # A truncated decode set preempted all of itself; those outside it have the room now.
            decodes = self._plan_decodes()
        if not self._has_preempted:
            self._promote()
        left = None if config.token_budget is None else config.token_budget - len(decodes)
        prefills = choose_chunks(places.prefilling.values(), config, left, self._start_late)
        if not decodes and not prefills:
            return None
        rows = sum(1 for chunk in prefills if chunk.is_last) if config.prefill_before_decode else 0
        return StepPlan(
            decodes=decodes,
            prefills=prefills,
            prefill_tokens=sum(chunk.count for chunk in prefills) - rows,
            context_tokens=sum([sequence.computed for sequence in decodes]),
            prefill_context=sum(chunk.count * (chunk.start + (chunk.count + 1) / 2) for chunk in prefills),
            decode_rows=len(decodes) + rows,
            activated=_taken(self._activated),
            preempted=_taken(self._preempted),
            waiting=len(places.waiting),
        )

    def commit(self, plan: StepPlan, output: ForwardOutput) -> Rows:
        """Apply a step: store tokens, end what is done, return the rows to send."""
        rows = self._start_rows()
        self.steps += 1
        self.kv.store(self._stored(plan))
        add_row, add_tokens, add_finish = rows.sequences.append, rows.tokens.append, rows.finishes.append
        logprobs = output.decode_logprobs or [None] * len(plan.decodes)
        for sequence, token, top in zip(plan.decodes, output.decode_tokens, logprobs, strict=True):
            if sequence.phase is not _DECODING:  # aborted while the step ran
                continue
            sequence.computed += 1
            generated = sequence.generated + 1
            if sequence.is_plain and generated < sequence.limit:  # what `_append` does, without the questions
                sequence.generated = sequence.reported = generated
                sequence.output.append(token)
                add_row(sequence)
                add_tokens([token])
                add_finish("")
            else:
                self._append(sequence, token, top, rows)
        logprobs = output.prefill_logprobs or [None] * len(plan.prefills)
        for chunk, first, top in zip(plan.prefills, output.prefill_tokens, logprobs, strict=True):
            sequence = chunk.sequence
            if sequence.phase is not _PREFILLING:
                continue
            sequence.computed += chunk.count
            self.kv.remember(sequence)
            if chunk.is_last:
                assert first is not None, "the model yields a token for a sequence's last chunk"
                self._places.start_decoding(sequence)
                self._append(sequence, first, top, rows)
        return rows

    def check(self) -> None:
        """Assert the invariants: places, slots, blocks, references and token counts."""
        self._places.check(self._active_cap)
        self.kv.check(self._places.active)

    # Admission.

    def _judge(self, request: Request) -> Admission:
        """Permanent refusals first, so that one is never reported as transient."""
        places = self._places
        if request.id in places.live:
            return Admission.REJECTED_DUPLICATE
        refusal = never_fits(request, self.config)
        if refusal is not None:
            return refusal
        free = 0 if self._is_head_blocked and places.waiting else self._active_cap - places.active_count
        place = place_for(self.config, waiting=len(places.waiting), free_slots=free)
        return Admission.QUEUED if self._hold and place is Admission.ADMITTED else place

    def _promote(self) -> None:
        """Give free slots to the head of the queue while its KV fits; strictly FIFO."""
        places = self._places
        self._is_head_blocked = False
        if self._hold:
            if len(places.waiting) < self._hold:
                return
            self._hold = 0
        joins_left = self.config.max_prefills_per_tick if self.config.recycle_batch else None
        while places.waiting and places.active_count < self._active_cap:
            if joins_left is not None and not places.slots.has_done:
                if not joins_left:
                    return
                joins_left -= 1
            if not self._starts_at_prefill and not self.kv.start(places.head, is_alone=not places.active_count):
                self._is_head_blocked = True
                return
            self._activated.append(places.start_head())

    def _start_late(self, sequence: Sequence) -> bool:
        """`single`: blocks for a prompt whose turn has come; it waits while others hold them."""
        return not self._has_preempted and self.kv.start(sequence, is_alone=False)

    # Decodes.

    def _plan_alone(self) -> StepPlan:
        """The step of one sequence that decodes while nothing waits: it can't be preempted or joined."""
        (sequence,) = self._places.decoding.values()
        if sequence.computed == sequence.capacity:
            has_room = self.kv.grow(sequence)
            assert has_room, "admission checked that a sequence fits alone"
        self.short_cuts += 1
        return StepPlan([sequence], [], 0, sequence.computed, 0, 1, _taken(self._activated))

    def _plan_decodes(self) -> list[Sequence]:
        candidates = list(self._places.decoding.values())
        if len(candidates) > self._max_decodes:
            start = self._rotation % len(candidates)
            candidates = (candidates[start:] + candidates[:start])[: self._max_decodes]
            self._rotation = start + self._max_decodes
        decodes = [
            sequence
            for sequence in candidates
            # A sequence that an older one preempted in this very pass is no longer decoding.
            if sequence.phase is _DECODING and (sequence.computed < sequence.capacity or self._grow(sequence))
        ]
        if self._has_preempted:
            decodes = [sequence for sequence in decodes if sequence.phase is _DECODING]
        return decodes

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, if need be from the youngest; False when the sequence itself was the youngest."""
        while not self.kv.grow(sequence):
            holders = [holder for holder in self._places.active if holder.blocks]
            victim = max(holders, key=lambda holder: holder.order)
            self._has_preempted = True
            if self._starts_at_prefill:
                self._evict(victim)
            else:
                self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        self._places.requeue(sequence)
        sequence.target = sequence.prompt_len + sequence.generated
        self._preempted.append(sequence)
        self.preemptions += 1

    def _evict(self, sequence: Sequence) -> None:
        """Take a sequence's KV for good; its row goes out with this step."""
        self._end(sequence, "cache_miss")
        sequence.reason = "cache_miss"
        self._evicted.append(sequence)

    # Progress and end.

    def _start_rows(self) -> Rows:
        """The rows of a step, those of sequences that it evicted first."""
        rows = Rows()
        for sequence in _taken(self._evicted):
            rows.add(sequence, sequence.unreported(), "cache_miss")
        return rows

    def _stored(self, plan: StepPlan) -> int:
        """Positions that the step has stored for sequences that are still there."""
        if not self._has_lost_rows:
            return len(plan.decodes) + sum(chunk.count for chunk in plan.prefills)
        return sum(1 for sequence in plan.decodes if sequence.phase is _DECODING) + sum(
            chunk.count for chunk in plan.prefills if chunk.sequence.phase is _PREFILLING
        )

    def _append(self, sequence: Sequence, token: int, top: TopLogprobs | None, rows: Rows) -> None:
        """One new token of a sequence: record it, end what is done, report it when a row is due."""
        finish = sequence.append(token, top)
        if finish:
            self._end(sequence, finish)
        if sequence.is_due(finish):
            rows.add(sequence, sequence.unreported(), finish)

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        self.kv.release(sequence)
        self._places.leave(sequence)
        self.finishes[finish] += 1
        self._has_lost_rows = True


def _taken(sequences: list[Sequence]) -> list[Sequence]:
    """What a note holds; it is empty afterwards."""
    taken = sequences[:]
    sequences.clear()
    return taken
