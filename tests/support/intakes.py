"""A world of attempts to append rows to, made as it is told and the same each time."""

from dataclasses import dataclass
from typing import Any

from gateway.core.events import RequestArrived
from gateway.core.outbox import Record
from gateway.core.request import Attempt, Request
from gateway.types import Sampling, TokenLogprob
from tests.support.native import slots_of

LARGE = 2**30 - 1
"""One more, and Python keeps a number in two digits."""
TOKENS = [0, 1, 7, 31_999, 2**30, 2**31, 2**32 - 1]
LOGPROBS = [TokenLogprob(-0.5)]


@dataclass
class Given:
    """One attempt and, but for a `twin` of the one before, its sequence."""

    tokens_out: int
    room: int
    is_done: bool
    is_twin: bool
    completion_tokens: int
    is_dirty: bool
    pending: Any
    record: str


@dataclass
class Row:
    of: int
    tokens: Any
    finish: str
    claims: int | None
    """Off the true count by so many."""
    logprobs: Any
    other: str
    """What `other` does, if it is called for this row."""


@dataclass
class Batch:
    attempts: list[Given]
    rows: list[Row]
    has_completion: bool
    has_logprobs: bool
    kind: type = list
    may_raise: bool = True


def make_record(kind):
    if kind == "none":
        return None
    record = Record(
        cache_bytes=0 if kind == "lasting" else 64, token_bytes=1 << 30 if kind in {"lasting", "both"} else 0
    )
    if kind == "spoiled":
        record.is_answer = False
    return record


class World:
    """The attempts as given, and what a way does to them."""

    def __init__(self, batch):
        self.batch, self.calls, self.dirty, self.attempts, self.names = batch, [], [], [], {}
        self.kept = []  # so that no other object gets a name that was given
        arrived = RequestArrived(
            client_key="c", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=9, logprobs=0)
        )
        for number, given_ in enumerate(batch.attempts):
            request = Request(number, arrived, 1.0)
            (sequence,) = request.sequences
            if given_.is_twin and self.attempts:
                sequence = self.attempts[-1].sequence
            else:
                sequence.completion_tokens, sequence.is_dirty = given_.completion_tokens, given_.is_dirty
                # Equal to the other world's, and not the same: a list is appended to.
                sequence.pending = tuple(given_.pending) if type(given_.pending) is tuple else [*given_.pending]
                sequence.record = make_record(given_.record)
                if sequence.is_dirty:
                    self.dirty.append(sequence)
            made = Attempt(sequence, f"id{number}", number, 0, 1, 0.5)
            made.tokens_out, made.is_done = given_.tokens_out, given_.is_done
            made.max_tokens = given_.tokens_out + given_.room
            self.attempts.append(made)
            self.kept += (made, sequence, sequence.record, request)
            self.names |= {id(made): f"attempt {number}", id(sequence): f"sequence {number}"}
            self.names |= {id(sequence.record): f"record {number}", id(request): f"request {number}"}
        self.names.pop(id(None), None)
        self.live = {made.wire_id: made for made in self.attempts}

    def columns(self):
        batch, seen = self.batch, {}
        claimed = []
        for each in batch.rows:
            seen[each.of] = seen.get(each.of, 0) + len(each.tokens)
            before = batch.attempts[each.of].tokens_out if 0 <= each.of < len(batch.attempts) else 0
            claimed.append(None if each.claims is None else before + seen[each.of] + each.claims)
        kind = batch.kind
        return [
            kind(f"id{each.of}" for each in batch.rows),
            kind(each.tokens for each in batch.rows),
            kind(each.finish for each in batch.rows),
            kind(claimed) if batch.has_completion else None,
            kind(each.logprobs for each in batch.rows) if batch.has_logprobs else None,
        ]

    def other(self, at, attempt):
        given_ = self.batch.rows[at]
        self.calls.append((at, attempt and self.names[id(attempt)], self.look()))
        if given_.other == "raises" and self.batch.may_raise:
            raise LookupError(at)
        if given_.other == "says nothing" and self.batch.may_raise:
            return None
        if given_.other == "ends another":
            self.attempts[at % len(self.attempts)].is_done = True
        elif attempt is not None:
            self.change(given_.other, attempt, given_.tokens)
        return len(given_.tokens) * 1000

    def change(self, how, attempt, tokens):
        sequence = attempt.sequence
        if how == "appends":
            attempt.tokens_out += len(tokens)
            sequence.append([token for token in tokens if 0 <= token < 2**32], None)
        elif how == "ends":
            attempt.is_done = True
        elif how == "empties":
            self.dirty.clear()
            sequence.take()
        elif how == "turns":
            sequence.pending = [*sequence.pending] if type(sequence.pending) is tuple else tuple(sequence.pending)
            sequence.record = None

    def look(self):
        sequences = {id(each.sequence): each.sequence for each in self.attempts}
        records = [each.record for each in sequences.values() if each.record is not None]
        everything = [*self.attempts, *sequences.values(), *records]
        return [slots_of(thing, self.names) for thing in everything], [self.names[id(each)] for each in self.dirty]

    def run(self, way):
        try:
            result = way(self.live, *self.columns(), self.dirty, self.other)
        except Exception as error:  # noqa: BLE001 - they are compared
            result = type(error), error.args if type(error) is LookupError else None
        return result, self.calls, self.look()
