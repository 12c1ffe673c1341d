"""What goes into a step and what comes out of it: the shapes between scheduler, model and codecs."""

from collections.abc import Sequence as SequenceOf
from enum import StrEnum

import msgspec

from engine_stub.scheduler.sequence import NO_IDS, Finish, Sampling, Sequence, TopLogprobs

__all__ = ["Admission", "ForwardOutput", "PrefillChunk", "Rows", "StepItem", "StepPlan", "TopLogprobs"]


class Admission(StrEnum):
    """What became of a submitted request; stable strings for logs, the control socket and tests.

    When several reasons hold, the first of this order is reported: duplicate, KV, scratch, then the
    slot or the queue, then the full queue. So a permanent refusal never looks transient.
    """

    ADMITTED = "ADMITTED"
    QUEUED = "QUEUED"
    REJECTED_QUEUE_FULL = "REJECTED_QUEUE_FULL"
    REJECTED_KV_BUDGET = "REJECTED_KV_BUDGET"
    REJECTED_SCRATCH_BUDGET = "REJECTED_SCRATCH_BUDGET"
    REJECTED_DUPLICATE = "REJECTED_DUPLICATE"

    @property
    def is_accepted(self) -> bool:
        """Whether the request is live now."""
        return self in (Admission.ADMITTED, Admission.QUEUED)


class PrefillChunk(msgspec.Struct, gc=False):
    """Positions `start .. start + count - 1` of one sequence; the last chunk yields a token."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool


class StepItem(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step, with all that a paged model needs to compute it.

    `token_ids` are run at positions `start .. start + len(token_ids) - 1`; the KV of every earlier
    position is stored. Position p lives in row `p % block_size` of pool block
    `block_table[p // block_size]`; the table covers the new positions too and is read-only (its first
    blocks may be shared with other sequences, but those are never written to again).
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: SequenceOf[int]
    needs_token: bool
    """False for a chunk that isn't its prompt's last: its KV is stored, its logits aren't wanted."""
    is_prefill: bool
    sampling: Sampling
    seed: int | None
    """With `position`, all that a random draw may depend on (never the batch, the rank or a clock)."""
    logprobs: int | None
    """How many alternatives to report beside the chosen token; None: no logprobs at all."""
    banned_ids: frozenset[int]
    """Ids that must not be chosen: the stop ids while fewer than `min_tokens` are out."""
    prompt_ids: SequenceOf[int]
    output_ids: SequenceOf[int]
    """Tokens generated before this step, for penalties. After a preemption part of `token_ids` comes from here."""

    @property
    def end(self) -> int:
        """Positions stored after this step."""
        return self.start + len(self.token_ids)

    @property
    def position(self) -> int:
        """Index in prompt + output of the token that this item yields."""
        return self.start + len(self.token_ids)


class StepPlan(msgspec.Struct):
    """One step: every decode row and prefill chunk, for one fused forward call.

    `context_tokens` are the KV positions that the decode rows attend to; `prefill_context` is the sum
    over chunks of tokens x mean positions attended to (the quadratic part of attention).
    `decode_rows` counts rows that extend a text, `prefill_tokens` the prompt positions beside them.
    `activated` got a slot since the step before, `preempted` lost theirs to this one, `waiting` have none.
    """

    decodes: list[Sequence]
    prefills: list[PrefillChunk]
    prefill_tokens: int
    context_tokens: int
    prefill_context: float
    decode_rows: int = 0
    activated: list[Sequence] = []
    preempted: list[Sequence] = []
    waiting: int = 0

    def without_prefills(self) -> "StepPlan":
        """The decodes alone."""
        return StepPlan(self.decodes, [], 0, self.context_tokens, 0.0, len(self.decodes))

    def without_decodes(self) -> "StepPlan":
        """The prefills alone."""
        rows = self.decode_rows - len(self.decodes)
        return StepPlan([], self.prefills, self.prefill_tokens, 0, self.prefill_context, rows)

    def items(self) -> list[StepItem]:
        """The step as a real model sees it: the decodes, then the prefill chunks. Built anew on each call."""
        return [_decode_item(sequence) for sequence in self.decodes] + [_chunk_item(chunk) for chunk in self.prefills]


class ForwardOutput(msgspec.Struct):
    """The model's answer, parallel to the plan. A chunk that isn't the last yields None.

    `duration_ms` is modelled time for the shell to let pass; a backend that computes for real says 0.
    `decode_logprobs` and `prefill_logprobs` are None when no sequence of the step asked.
    """

    decode_tokens: list[int]
    prefill_tokens: list[int | None]
    duration_ms: float = 0.0
    decode_logprobs: list[TopLogprobs | None] | None = None
    prefill_logprobs: list[TopLogprobs | None] | None = None

    @classmethod
    def of_items(
        cls, plan: StepPlan, tokens: SequenceOf[int | None], logprobs: SequenceOf[TopLogprobs | None] | None = None
    ) -> "ForwardOutput":
        """The answer from columns parallel to `plan.items()`: a token per item that needs one, else None."""
        cut = len(plan.decodes)
        decode_tokens = [token for token in tokens[:cut] if token is not None]
        output = cls(decode_tokens, list(tokens[cut:]))
        if logprobs is not None:
            output.decode_logprobs, output.prefill_logprobs = list(logprobs[:cut]), list(logprobs[cut:])
        return output


class Rows(msgspec.Struct):
    """Output rows of one step as parallel columns. `tokens` are new since the sequence's last row."""

    sequences: list[Sequence] = []
    tokens: list[list[int]] = []
    finishes: list[Finish] = []

    def add(self, sequence: Sequence, tokens: list[int], finish: Finish) -> None:
        """Append one row."""
        self.sequences.append(sequence)
        self.tokens.append(tokens)
        self.finishes.append(finish)

    def followed_by(self, later: "Rows") -> "Rows":
        """These rows and then those."""
        if not later.sequences:
            return self
        return Rows(self.sequences + later.sequences, self.tokens + later.tokens, self.finishes + later.finishes)

    def by_client(self) -> "dict[int, Rows]":
        """The rows of each front end; without rows, none for the first."""
        clients = {sequence.request.client for sequence in self.sequences}
        if clients <= {0}:
            return {0: self}
        parts: dict[int, Rows] = {}
        for sequence, tokens, finish in zip(self.sequences, self.tokens, self.finishes, strict=True):
            parts.setdefault(sequence.request.client, Rows()).add(sequence, tokens, finish)
        return parts

    def without(self, request_id: str) -> "Rows":
        """The rows of all other requests."""
        kept = Rows()
        for sequence, tokens, finish in zip(self.sequences, self.tokens, self.finishes, strict=True):
            if sequence.id != request_id:
                kept.add(sequence, tokens, finish)
        return kept


def _decode_item(sequence: Sequence) -> StepItem:
    return _item(sequence, [sequence.output[-1]], sequence.computed, needs_token=True, is_prefill=False)


def _chunk_item(chunk: PrefillChunk) -> StepItem:
    sequence, start = chunk.sequence, chunk.start
    return _item(sequence, sequence.text(start, start + chunk.count), start, needs_token=chunk.is_last, is_prefill=True)


def _item(sequence: Sequence, token_ids: list[int], start: int, *, needs_token: bool, is_prefill: bool) -> StepItem:
    request = sequence.request
    return StepItem(
        sequence.id,
        token_ids,
        start,
        sequence.blocks,
        needs_token,
        is_prefill,
        request.sampling,
        request.seed,
        request.logprobs,
        sequence.stops if sequence.generated < sequence.min_tokens else NO_IDS,
        request.prompt_ids,
        sequence.output,
    )
