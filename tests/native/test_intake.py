"""The rows of a batch into the outboxes: in C as in Python, whatever state they meet."""

import gc
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import rows
from gateway.core.outbox import Record
from gateway.core.request import Attempt, Sequence
from gateway.core.rows import MAX_PENDING, append_in_python
from tests.support.intakes import LARGE, LOGPROBS, TOKENS, Batch, Given, Row, World
from tests.support.native import assert_references_stay, compiled_or_skip, slots_of

Intake = compiled_or_skip().Intake
append_compiled = Intake(Attempt, Sequence, Record, MAX_PENDING).append

mostly = st.sampled_from
token = st.sampled_from(TOKENS) | st.integers(0, 2**32 - 1)
pending = st.builds(
    lambda kind, size: kind(range(size)),
    mostly([tuple, tuple, list]),
    mostly([0, 0, 0, 1, 2, MAX_PENDING - 2, MAX_PENDING - 1, MAX_PENDING, MAX_PENDING + 1]),
)
attempt = st.builds(
    Given,
    tokens_out=mostly([0, 1, 1, 5, 200, LARGE - 1, LARGE, LARGE + 1, 2**40]),
    room=mostly([-1, 0, 1, 2, 3, 100, 100, 100]),
    is_done=mostly([False] * 6 + [True]),
    is_twin=mostly([False] * 5 + [True]),
    completion_tokens=mostly([0, 1, 5, LARGE - 1, LARGE, 2**40]),
    is_dirty=mostly([False, False, True]),
    pending=pending,
    record=mostly(["none", "none", "lasting", "answer", "both", "spoiled"]),
)
row = st.builds(
    Row,
    of=mostly([0, 0, 0, 1, 1, 2, 3, 4, 5, 6, -1]),
    tokens=st.tuples(token)
    | st.tuples(token)
    | st.tuples(token)
    | mostly([(), [], [7], (7, 8), [7, 8, 9], (2**32,), (-1,), tuple(range(200))]),
    finish=mostly([""] * 12 + ["stop", "length", "abort", "error"]),
    claims=mostly([0] * 10 + [None, None, 1, -1]),
    logprobs=mostly([None] * 8 + [LOGPROBS, []]),
    other=mostly(["counts"] * 6 + ["appends", "ends", "ends another", "empties", "turns", "raises", "says nothing"]),
)


batch = st.builds(
    Batch,
    attempts=st.lists(attempt, min_size=1, max_size=7),
    rows=st.lists(row, max_size=12) | st.lists(row, min_size=12, max_size=45),
    has_completion=st.booleans(),
    has_logprobs=mostly([False, False, True]),
    kind=mostly([list, list, tuple]),
    may_raise=mostly([False, False, False, True]),
)


def test_it_is_what_the_gateway_appends_with():
    assert type(rows.append_rows.__self__) is Intake


@settings(max_examples=250)
@given(batch)
def test_both_ways_come_to_the_same(batch):
    assert World(batch).run(append_compiled) == World(batch).run(append_in_python)


def ordinary(rows=100, **more):
    values = {"tokens_out": 1, "room": 500, "is_done": False, "is_twin": False, "completion_tokens": 1}
    values |= {"is_dirty": False, "pending": (), "record": "none"} | more
    attempts = [Given(**values) for _ in range(7)]
    return Batch(attempts, [Row(at % 7, (at,), "", 0, None, "raises") for at in range(rows)], True, False)


RECORDS = ["none", "lasting", "answer", "both", "spoiled"]
OUTBOXES = [kind(range(size)) for kind in (tuple, list) for size in (0, MAX_PENDING, 1, 2, MAX_PENDING - 1)]
ROWS = [
    *(Row(0, tokens, "", 0, None, "counts") for tokens in ((7,), [7], (), [], (7, 8), (2**32,), (-1,))),
    *(Row(0, (7,), finish, 0, None, "counts") for finish in ("stop", "length", "abort", "error")),
    *(Row(0, (7,), "", claims, None, "counts") for claims in (None, 1, -1)),
    *(Row(0, (7,), "", 0, logprobs, "counts") for logprobs in ([], LOGPROBS)),
]


@pytest.mark.parametrize("record", RECORDS)
def test_one_row_in_every_state(record):
    for out, room, done, is_dirty, pending in product((0, 1, LARGE), (0, 1, 2), (0, 1), (0, 1), OUTBOXES):
        state = {"tokens_out": out, "room": room, "is_done": bool(done), "is_dirty": bool(is_dirty), "pending": pending}
        batch = ordinary(2, record=record, **state)
        del batch.attempts[1:]
        batch.rows = [Row(0, (7,), "", 0, None, "counts"), Row(0, (8,), "", 0, None, "counts")]
        assert World(batch).run(append_compiled) == World(batch).run(append_in_python)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("has_column", [False, True])
def test_every_row_in_an_ordinary_state(record, has_column):
    for row, pending in product(ROWS, OUTBOXES):
        batch = ordinary(2, record=record, pending=pending)
        del batch.attempts[1:]
        batch.rows, batch.has_completion, batch.has_logprobs = [row, ROWS[0]], has_column, has_column
        assert World(batch).run(append_compiled) == World(batch).run(append_in_python)


@pytest.mark.parametrize("record", ["none", "lasting", "spoiled"])
@pytest.mark.parametrize("pending", [(), (1,), [1, 2]], ids=lambda value: type(value).__name__)
def test_ordinary_rows_are_for_nobody_else(pending, record):
    batch = ordinary(pending=pending, record=record)
    world = World(batch)
    assert world.run(append_compiled) == World(batch).run(append_in_python)
    assert not world.calls
    assert len(world.dirty) == 7


def test_nothing_is_kept_or_lost_of_what_it_was_given():
    batch = ordinary(record="lasting")
    world = World(batch)
    columns = world.columns()
    columns[1] = [(10**6 + at,) for at in range(100)]
    watched = [*columns, *columns[0], *columns[1], *world.attempts, world.live, world.dirty, Attempt, Sequence, Record]
    watched += [each.sequence for each in world.attempts]

    def counts():
        gc.collect()
        return [sys.getrefcount(thing) for thing in watched]

    def once():
        for each in world.attempts:
            each.sequence.take()
            each.tokens_out = 1
        world.dirty.clear()
        append_compiled(world.live, *columns[:3], None, None, world.dirty, world.other)

    assert_references_stay(once, counts)
    with pytest.raises(LookupError):
        append_compiled(world.live, ["id0"], [[1]], [""], None, None, [], world.other)


@pytest.mark.parametrize("column", range(1, 5))
@pytest.mark.parametrize("size", [0, 1, 2, 4, 50])
@pytest.mark.parametrize("kind", [list, tuple])
def test_columns_of_different_lengths_are_refused(column, size, kind):
    batch = ordinary(rows=3)
    columns = [["id0"] * 3, [(1,)] * 3, [""] * 3, [None] * 3, [None] * 3]
    columns[column] = kind((columns[column] * 20)[:size])
    for way in (append_compiled, append_in_python):
        world = World(batch)
        with pytest.raises(ValueError):
            way(world.live, *columns, world.dirty, world.other)
    assert World(batch).run(append_compiled)[0] == 3


def test_without_rows_nothing_happens():
    assert (
        append_compiled({}, [], [], [], [], [], [], None) == append_compiled({}, (), (), (), None, None, [], None) == 0
    )


GOOD = [{}, ["a"], [(1,)], [""], None, None, [], lambda at, attempt: 5]


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        *((0, bad) for bad in (None, [], "x", 5)),
        *((at, bad) for at in (1, 2, 3) for bad in (None, 5, object())),
        *((at, bad) for at in (4, 5) for bad in (5, object())),
        *((6, bad) for bad in (None, (), {}, 5)),
        *((7, bad) for bad in (None, 5, lambda: 5, lambda at, attempt: None, lambda at, attempt: "x")),
        *((1, [bad]) for bad in (None, 5, b"a", ("a",), [])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_of_other_kinds_are_refused(at, bad):
    assert append_compiled(*GOOD) == 5
    with pytest.raises(TypeError):
        append_compiled(*GOOD[:at], bad, *GOOD[at + 1 :])


def test_the_number_of_arguments():
    for arguments in ((), GOOD[:-1], [*GOOD, 1]):
        with pytest.raises(TypeError):
            append_compiled(*arguments)
    for arguments in ((), (Attempt, Sequence, Record), (Attempt, Sequence, Record, "5"), (1, 2, 3, 4)):
        with pytest.raises(TypeError):
            Intake(*arguments)


CLASSES = [Attempt, Sequence, Record]
NEEDED = {
    Attempt: {"is_done", "max_tokens", "sequence", "tokens_out"},
    Sequence: {"completion_tokens", "is_dirty", "pending", "record"},
    Record: {"is_answer", "token_ids"},
}


@pytest.mark.parametrize("lacks", range(3))
@pytest.mark.parametrize("has_others", [False, True])
def test_a_class_without_slots_is_refused(lacks, has_others):
    classes = [*CLASSES]
    names = NEEDED[classes[lacks]] if has_others else ()
    classes[lacks] = type("Lacking", (), dict.fromkeys(names, property()))
    with pytest.raises(TypeError, match="slot"):
        Intake(*classes, MAX_PENDING)


@pytest.mark.parametrize(("at", "slot"), [(at, slot) for at, cls in enumerate(CLASSES) for slot in sorted(NEEDED[cls])])
def test_each_slot_is_needed(at, slot):
    classes = [*CLASSES]
    classes[at] = type("Lacking", (), {"__slots__": sorted(NEEDED[classes[at]] - {slot})})
    with pytest.raises(TypeError, match=slot):
        Intake(*classes, MAX_PENDING)


@pytest.mark.parametrize(
    "thing", [object(), 5, None, "x", Sequence, Attempt.__new__(Attempt)], ids=lambda value: type(value).__name__
)
def test_what_is_no_whole_attempt_is_for_somebody_else(thing):
    asked = []
    total = append_compiled(
        {"a": thing}, ["a"] * 3, [(1,)] * 3, [""] * 3, None, None, [], lambda *at: asked.append(at) or 2
    )
    assert total == 6
    assert asked == [(at, thing) for at in range(3)]


@pytest.mark.parametrize("slot", ["is_done", "max_tokens", "sequence", "tokens_out"])
@pytest.mark.parametrize("value", [None, object(), "unset", -1, 1.0, 2**80, True])
def test_an_attempt_in_disorder_is_no_crash(slot, value):
    world = World(ordinary(rows=1))
    (made, *_) = world.attempts
    delattr(made, slot) if value == "unset" else setattr(made, slot, value)
    before = slots_of(made, world.names)
    append_compiled(world.live, ["id0"], [(1,)], [""], None, None, world.dirty, lambda at, attempt: 0)
    if not (slot == "max_tokens" and type(value) is int):
        assert slots_of(made, world.names) == before


@pytest.mark.parametrize("slot", ["completion_tokens", "is_dirty", "pending", "record"])
@pytest.mark.parametrize("value", [object(), "unset", -1, 1.0, 2**80, "x"])
def test_a_sequence_in_disorder_is_no_crash(slot, value):
    world = World(ordinary(rows=1))
    sequence = world.attempts[0].sequence
    delattr(sequence, slot) if value == "unset" else setattr(sequence, slot, value)
    before = slots_of(sequence, world.names)
    assert append_compiled(world.live, ["id0"], [(1,)], [""], None, None, world.dirty, lambda at, attempt: 9) == 9
    assert slots_of(sequence, world.names) == before
