"""The tick machine: decode first, then bounded prefill; paged KV; abort at any moment.

One step is `plan()` -> the model's `forward(plan)` -> `commit(plan, output)`. Between the two calls
requests may be submitted and aborted: an abort frees its blocks at once and `commit` skips its row.
Rules that the tests hold it to:

* every decoding sequence gets a row in every step while the decode set fits the caps; when it doesn't,
  the set rotates so that nobody starves;
* a sequence prefilled in one step first decodes in the next; the last prefill chunk yields a token;
* a slot freed in one step is filled at the start of the next; joins are FIFO;
* scheduled tokens never exceed the token budget; used blocks never exceed the pool;
* a preempted sequence keeps its output, rejoins at the head of the queue and recomputes its text; a
  step that preempted starts nothing new (otherwise the newcomers are the next victims).
"""

from collections import OrderedDict

from engine_stub.scheduler.blocks import BlockPool
from engine_stub.scheduler.config import SchedulerConfig
from engine_stub.scheduler.plan import Admission, ForwardOutput, PrefillChunk, Rows, StepPlan, TopLogprobs
from engine_stub.scheduler.sequence import Finish, Phase, Request, Sequence

# Share of the pool that stays free when an optimistic scheduler starts a sequence beside running ones;
# without headroom the newcomer is preempted by its neighbours' next block.
WATERMARK = 0.01

# Plain names: an enum attribute costs a metaclass lookup, and these are read for every row.
_DECODING = Phase.DECODING
_PREFILLING = Phase.PREFILLING


class Scheduler:
    """One rank's queue, slots and KV pool. Pure; single-threaded."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.total_blocks)
        self.steps = 0
        self.preemptions = 0
        self._live: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._prefilling: dict[str, Sequence] = {}
        self._decoding: dict[str, Sequence] = {}
        self._submitted = 0
        self._rotation = 0
        self._hold = config.hold_until_queued
        self._has_preempted = False
        caps = [cap for cap in (config.max_batch_size, config.token_budget) if cap is not None]
        self._max_decodes = min(caps) if caps else config.max_active

    @property
    def live_ids(self) -> frozenset[str]:
        """Ids that are waiting, prefilling or decoding."""
        return frozenset(self._live)

    @property
    def live_count(self) -> int:
        """How many sequences are live."""
        return len(self._live)

    @property
    def active_count(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for a slot, preempted ones included."""
        return len(self._waiting)

    def sequence(self, request_id: str) -> Sequence | None:
        """The live sequence of an id."""
        return self._live.get(request_id)

    def submit(self, request: Request) -> Admission:
        """Accept a request or say why not; a refused one leaves no trace."""
        admission = self._judge(request)
        if admission.is_accepted:
            sequence = Sequence(request, self._submitted)
            self._submitted += 1
            self._live[request.id] = sequence
            self._waiting[request.id] = sequence
        return admission

    def abort(self, request_id: str) -> bool:
        """End a live request now and free its blocks; False for an unknown id (idempotent)."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def plan(self) -> StepPlan | None:
        """Choose the next step; None when there is nothing to run. Takes the blocks that the step writes."""
        self._has_preempted = False
        decodes = self._plan_decodes()
        while not decodes and self._has_preempted and self._decoding:
            # A truncated decode set preempted all of itself; those outside it have the room now.
            decodes = self._plan_decodes()
        if not self._has_preempted:
            self._promote()
        budget = self.config.token_budget
        prefills = self._plan_prefills(None if budget is None else budget - len(decodes))
        if not decodes and not prefills:
            return None
        return StepPlan(
            decodes=decodes,
            prefills=prefills,
            prefill_tokens=sum(chunk.count for chunk in prefills),
            context_tokens=sum([sequence.computed for sequence in decodes]),
            prefill_context=sum(chunk.count * (chunk.start + (chunk.count + 1) / 2) for chunk in prefills),
        )

    def commit(self, plan: StepPlan, output: ForwardOutput) -> Rows:
        """Apply a step: store tokens, end what is done, return the rows to send."""
        rows = Rows()
        self.steps += 1
        add_row, add_tokens, add_finish = rows.sequences.append, rows.tokens.append, rows.finishes.append
        logprobs = output.decode_logprobs or [None] * len(plan.decodes)
        for sequence, token, top in zip(plan.decodes, output.decode_tokens, logprobs, strict=True):
            if sequence.phase is not _DECODING:  # aborted while the step ran
                continue
            sequence.computed += 1
            generated = sequence.generated + 1
            if sequence.is_plain and generated < sequence.limit:  # what `_append` does, without the questions
                sequence.generated = generated
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
            if chunk.is_last:
                assert first is not None, "the model yields a token for a sequence's last chunk"
                sequence.phase = _DECODING
                del self._prefilling[sequence.id]
                self._decoding[sequence.id] = sequence
                self._append(sequence, first, top, rows)
        return rows

    def check(self) -> None:
        """Assert the invariants: every live id in exactly one place, blocks accounted for."""
        active = [*self._prefilling.values(), *self._decoding.values()]
        assert len(active) <= self.config.max_active
        assert len(self._live) == len(active) + len(self._waiting)
        assert self.pool.used == sum(len(sequence.blocks) for sequence in active)
        assert self.pool.promised == sum(sequence.promised for sequence in active)
        assert 0 <= self.pool.available <= self.pool.total
        assert self.pool.high_water <= self.pool.total
        for sequence in active:
            assert sequence.computed <= sequence.capacity
        for sequence in self._waiting.values():
            assert not sequence.blocks
            assert not sequence.promised
        for sequence in self._decoding.values():
            assert sequence.computed == sequence.prompt_len + sequence.generated - 1

    # Admission.

    def _judge(self, request: Request) -> Admission:
        """Permanent refusals first, so that one is never reported as transient."""
        if request.id in self._live:
            return Admission.REJECTED_DUPLICATE
        if self._blocks_for(len(request.prompt_ids) + request.max_tokens - 1) > self.pool.total:
            return Admission.REJECTED_KV_BUDGET
        queued = len(self._waiting) - (self.config.max_active - self.active_count)
        if queued < 0:
            return Admission.ADMITTED
        depth = self.config.max_queue_depth
        return Admission.QUEUED if depth is None or queued < depth else Admission.REJECTED_QUEUE_FULL

    def _promote(self) -> None:
        """Give free slots to the head of the queue while its KV fits; strictly FIFO."""
        if self._hold:
            if len(self._waiting) < self._hold:
                return
            self._hold = 0
        while self._waiting and self.active_count < self.config.max_active:
            sequence = next(iter(self._waiting.values()))
            if not self._take_prompt_blocks(sequence):
                return
            self._waiting.popitem(last=False)
            sequence.phase = _PREFILLING
            self._prefilling[sequence.id] = sequence

    def _take_prompt_blocks(self, sequence: Sequence) -> bool:
        """Blocks for all text that must be computed, and in `reserve` mode the promise of the rest."""
        needed = self._blocks_for(sequence.target)
        if self.config.kv_admission == "reserve":
            worst = self._blocks_for(sequence.prompt_len + sequence.limit - 1)
            if worst > self.pool.available:
                return False
            sequence.promised = worst - needed
            sequence.blocks = self.pool.take(needed)
            self.pool.promise(sequence.promised)
        else:
            headroom = int(self.pool.total * WATERMARK) if self.active_count else 0
            if needed + headroom > self.pool.available:
                return False
            sequence.blocks = self.pool.take(needed)
        sequence.capacity = needed * self.config.block_size
        return True

    # Planning.

    def _plan_decodes(self) -> list[Sequence]:
        candidates = list(self._decoding.values())
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
        if sequence.promised:
            sequence.promised -= 1
            sequence.blocks += self.pool.take_promised(1)
        else:
            while not self.pool.available:
                active = [*self._decoding.values(), *self._prefilling.values()]
                victim = max(active, key=lambda candidate: candidate.order)
                self._preempt(victim)
                if victim is sequence:
                    return False
            sequence.blocks += self.pool.take(1)
        sequence.capacity += self.config.block_size
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_slot(sequence)
        sequence.phase = Phase.WAITING
        sequence.computed = 0
        sequence.target = sequence.prompt_len + sequence.generated
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)
        self._has_preempted = True
        self.preemptions += 1

    def _plan_prefills(self, budget: int | None) -> list[PrefillChunk]:
        """Chunks in slot order (unfinished prompts come first) within what the decodes left over."""
        config = self.config
        room = min((cap for cap in (budget, config.max_prefill_tokens_per_tick) if cap is not None), default=None)
        chunks: list[PrefillChunk] = []
        for sequence in self._prefilling.values():
            if len(chunks) == config.max_prefills_per_tick or room == 0:
                break
            left = sequence.target - sequence.computed
            count = min(cap for cap in (left, room, config.prefill_chunk_size) if cap is not None)
            chunks.append(PrefillChunk(sequence, sequence.computed, count, count == left))
            if room is not None:
                room -= count
        return chunks

    # Progress and end.

    def _append(self, sequence: Sequence, token: int, top: TopLogprobs | None, rows: Rows) -> None:
        """One new token of a sequence: record it, see whether it is the last, report it when a row is due."""
        sequence.output.append(token)
        generated = sequence.generated + 1
        sequence.generated = generated
        if sequence.logprobs is not None:
            sequence.logprobs.append(top or [])
        finish: Finish = ""
        if token in sequence.stops and generated >= sequence.min_tokens:
            finish = "stop"
            sequence.stop_token = token
        elif generated >= sequence.limit:
            finish = "length"
        if finish:
            self._end(sequence)
        elif sequence.interval != 1 and generated != 1 and generated % sequence.interval:
            return
        if sequence.interval == 1:
            rows.add(sequence, [token], finish)
        else:
            rows.add(sequence, sequence.output[sequence.reported :], finish)
        sequence.reported = generated

    def _end(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING:
            del self._waiting[sequence.id]
        else:
            self._leave_slot(sequence)
        del self._live[sequence.id]
        sequence.phase = Phase.ENDED

    def _leave_slot(self, sequence: Sequence) -> None:
        """Free the slot and every block, stored or promised."""
        slots = self._decoding if sequence.phase is _DECODING else self._prefilling
        del slots[sequence.id]
        self.pool.give_back(sequence.blocks, sequence.promised)
        sequence.blocks = []
        sequence.capacity = 0
        sequence.promised = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
