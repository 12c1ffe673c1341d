"""What the compiled flush is not made for: it says so, or leaves it to somebody else, and never crashes."""

import pytest

from gateway.core.request import Sequence
from gateway.edges.grpc_engine.encode import SequenceEncoder
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.streams import Stream
from tests.support.native import compiled_or_skip, slots_of
from tests.support.outlets import Link, World

Outlet = compiled_or_skip().Outlet
flush_compiled = Outlet(Sequence, SequenceEncoder, Stream, Outbound).flush

CLASSES = [Sequence, SequenceEncoder, Stream, Outbound]


@pytest.mark.parametrize("arguments", [(), ([],), ([], None), ((), None, None), (None, None, None), ([], 1, 2, 3)])
def test_arguments_of_other_kinds_are_refused(arguments):
    with pytest.raises(TypeError):
        flush_compiled(*arguments)
    assert flush_compiled([], None, None) is None


@pytest.mark.parametrize(
    "item", [None, 5, "x", object(), Sequence.__new__(Sequence)], ids=lambda value: type(value).__name__
)
def test_what_is_no_whole_sequence_is_for_somebody_else(item):
    asked = []
    flush_compiled([item] * 20, asked.append, None)
    assert asked == [item] * 20
    with pytest.raises(TypeError):
        flush_compiled([item], None, None)


@pytest.mark.parametrize("lacks", range(4))
@pytest.mark.parametrize("has_others", [False, True])
def test_a_class_without_slots_is_refused(lacks, has_others):
    slots = [slot for cls in CLASSES[lacks].__mro__ for slot in getattr(cls, "__slots__", ())]
    classes = [*CLASSES]
    classes[lacks] = type("Lacking", (), dict.fromkeys(slots if has_others else (), property()))
    with pytest.raises(TypeError, match="slot"):
        Outlet(*classes)
    for arguments in ((), CLASSES[:3], [*CLASSES, 1], [*CLASSES[:3], 5]):
        with pytest.raises(TypeError):
            Outlet(*arguments)


SLOTS = {
    0: ("cached_tokens", "finish", "logprobs", "packed", "pending", "sink"),
    1: ("_cached_tokens", "_chunk_end", "_chunk_middle", "_chunk_tag", "_completed", "_ids", "stream"),
    2: ("backlog", "has_ended", "has_headers", "id", "out", "send_window"),
    3: ("is_paused", "max_push_bytes", "parts", "send_window"),
}


@pytest.mark.parametrize(("at", "slot"), [(at, slot) for at, slots in SLOTS.items() for slot in slots])
@pytest.mark.parametrize(
    "value",
    [object(), "unset", -1, 1.5, "x", b"x", [object()], (-1,), (2**32,), (1.0,)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_in_disorder_is_for_somebody_else_and_no_crash(at, slot, value):
    world, asked = World([Link()]), []
    thing = next(each for each in world.things if type(each) is CLASSES[at])
    if (at, type(value)) == (1, bytes) or (slot == "parts" and type(value) is list):
        return  # which it may be
    delattr(thing, slot) if value == "unset" else setattr(thing, slot, value)
    before = [slots_of(each, world.names) for each in world.things if type(each) in CLASSES]
    flush_compiled(world.sequences, asked.append, world.broken)
    assert asked == world.sequences
    assert [slots_of(each, world.names) for each in world.things if type(each) in CLASSES] == before
