"""From outboxes to frames: in C as in Python, whatever state they meet."""

import gc
import sys
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.request import Request, Sequence
from gateway.edges.flushing import flush_each
from gateway.edges.grpc_engine import outlet
from gateway.edges.grpc_engine.encode import TOKENSPEED, VLLM, SequenceEncoder
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.streams import Stream
from tests.support.native import assert_references_stay, compiled_or_skip
from tests.support.outlets import AMPLE, Channel, Link, Outbox, World

Outlet = compiled_or_skip().Outlet
flush_compiled = Outlet(Sequence, SequenceEncoder, Stream, Outbound).flush

EDGES = sorted({(1 << bits) + step for bits in (0, 7, 12, 14, 19, 21, 28) for step in (-1, 0, 1)})
COUNTS = [*EDGES, 1, 2, 126, 2**31 - 131, 2**31 - 130, 2**31 - 129, 2**31 - 128, 2**31, 2**35]
LENGTHS = [1, 1, 30, 110, 1000, 1010, 1990, 2020, 2025, 2028, 2030, 2032, 2036, 2040, 2047, 2048, 2049, 5000]

mostly = st.sampled_from
token = st.sampled_from([*EDGES, 2**32 - 1]) | st.integers(0, 2**32 - 1)
tokens = (
    st.tuples(token)
    | st.tuples(token)
    | st.lists(token, min_size=1, max_size=4)
    | st.lists(token, max_size=4).map(tuple)
    | mostly([(), [], (2**32 - 1,) * 127, [2**28] * 128, (7,) * 129, [1] * 128, (-1,), [2**32]])
)
outbox = st.builds(
    Outbox,
    tokens=tokens,
    index=mostly([1, 15, 16, 200]),
    completed=mostly(COUNTS) | st.integers(0, 5000),
    has_record=mostly([False, False, True]),
    cached=mostly([0, 0, 5, 300]),
    news=mostly([0, 0, 0, 5, 300]),
    finish=mostly([""] * 8 + ["stop", "length", "abort"]),
    has_logprobs=mostly([False] * 8 + [True]),
    packed=mostly([0] * 8 + [1, 130]),
    sink=mostly(["lane"] * 12 + ["closed", "writer", "somebody"]),
)


def in_order(made):
    """An outbox is rarely out of step with what was told of cached tokens."""
    made.news = made.cached if made.news == 0 else made.news
    return made


channel = st.builds(
    Channel,
    outboxes=st.lists(outbox.map(in_order), min_size=1, max_size=2),
    layout=mostly([VLLM, TOKENSPEED]),
    request_id=mostly(LENGTHS).map("r".__mul__) | st.text(max_size=9),
    prompt_tokens=mostly([0, 3, 127, 128, 300]),
    left=mostly([AMPLE] * 6 + [0, 0, -1, 1, 50, -500]),
    backlog=mostly([b""] * 9 + [b"waits"]),
    has_headers=mostly([True] * 9 + [False]),
    has_ended=mostly([False] * 9 + [True]),
)
link = st.builds(
    Link,
    channels=st.lists(channel, min_size=1, max_size=5),
    left=mostly([AMPLE] * 4 + [0, 0, -1, 1, 50]),
    messages=st.integers(0, 5),
    spare=mostly([AMPLE] * 6 + [0, -1, 1, -100]),
    is_paused=mostly([False] * 8 + [True]),
    parts=mostly([[], [], [b"earlier"]]),
    failing_wakes=mostly([0] * 5 + [1, 2, 20]),
)


def test_it_is_what_the_gateway_flushes_with():
    assert type(outlet.flush_items.__self__) is Outlet


@settings(max_examples=250)
@given(
    st.lists(link, min_size=1, max_size=3),
    st.none() | st.lists(st.integers(0, 40), max_size=30),
    mostly([None] * 5 + list(range(6))),
)
def test_both_ways_come_to_the_same(links, order, raises_at):
    wanted = World(links, raises_at).run(flush_each, order)
    assert World(links, raises_at).run(flush_compiled, order) == wanted


@pytest.mark.parametrize("layout", [VLLM, TOKENSPEED])
@pytest.mark.parametrize("completed", COUNTS)
@pytest.mark.parametrize("tokens", [(300,), (1, 2, 3), [2**32 - 1] * 127], ids=len)
def test_counts_of_every_length(layout, completed, tokens):
    links = [Link([Channel([Outbox(tokens, completed=completed)], layout)])]
    assert World(links).run(flush_compiled) == World(links).run(flush_each)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("tokens", [(300,), (1, 2, 3), [2**32 - 1] * 127], ids=len)
def test_request_ids_of_every_length(size, tokens):
    links = [Link([Channel([Outbox(tokens)], TOKENSPEED, "r" * size)])]
    assert World(links).run(flush_compiled) == World(links).run(flush_each)


@pytest.mark.parametrize("left", [-1, 0, 1])
@pytest.mark.parametrize("of", ["stream", "connection", "frame"])
@pytest.mark.parametrize("tokens", [(300,), (1, 2, 3)], ids=len)
def test_the_last_byte_of_a_window_is_used_and_no_more(left, of, tokens):
    channel = Channel([Outbox(tokens)], left=left if of == "stream" else AMPLE)
    made = Link([channel])
    if of == "connection":
        made.left, made.messages = left, 1
    elif of == "frame":
        made.spare = left
    asked = []
    world = World([made])
    flush_compiled([*world.items], asked.append, world.broken)
    assert asked == world.items[1 if left >= 0 else 0 :]
    assert World([made]).run(flush_compiled) == World([made]).run(flush_each)


STRANGE = {
    "news of cached tokens": lambda link, channel, outbox: setattr(outbox, "news", 5),
    "no news of cached tokens": lambda link, channel, outbox: setattr(outbox, "cached", 5),
    "a finish": lambda link, channel, outbox: setattr(outbox, "finish", "stop"),
    "logprobs": lambda link, channel, outbox: setattr(outbox, "has_logprobs", True),
    "a long backlog": lambda link, channel, outbox: setattr(outbox, "packed", 130),
    "a closed lane": lambda link, channel, outbox: setattr(outbox, "sink", "closed"),
    "a writer": lambda link, channel, outbox: setattr(outbox, "sink", "writer"),
    "somebody else": lambda link, channel, outbox: setattr(outbox, "sink", "somebody"),
    "a large count": lambda link, channel, outbox: setattr(outbox, "completed", 2**31),
    "what waits": lambda link, channel, outbox: setattr(channel, "backlog", b"x"),
    "no headers": lambda link, channel, outbox: setattr(channel, "has_headers", False),
    "an end": lambda link, channel, outbox: setattr(channel, "has_ended", True),
    "no window": lambda link, channel, outbox: setattr(channel, "left", -500),
    "a pause": lambda link, channel, outbox: setattr(link, "is_paused", True),
    "no window of the connection": lambda link, channel, outbox: setattr(link, "left", -500),
    "a small frame": lambda link, channel, outbox: setattr(link, "spare", -1),
}


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("tokens", [(300,), [300], (1, 2, 3), [1, 2, 3]], ids=str)
@pytest.mark.parametrize("has_record", [False, True])
def test_one_thing_out_of_the_ordinary_is_for_somebody_else(what, tokens, has_record):
    outbox = Outbox(tokens, has_record=has_record)
    channel = Channel([outbox])
    made = Link([channel])
    STRANGE[what](made, channel, outbox)
    asked, world = [], World([made])
    stream = next(each for each in world.things if type(each) is Stream)
    stream.backlog = bytearray(channel.backlog)
    if what == "what waits":  # and the lane knows nothing of it
        world.sequences[0].sink.stream = stream
    flush_compiled(world.sequences, asked.append, world.broken)
    assert asked == world.sequences
    assert World([made]).run(flush_compiled) == World([made]).run(flush_each)


def ordinary(count=30, **more):
    return [
        Link([Channel([Outbox((at,), completed=at, **more), Outbox([at, 1], 1, **more)]) for at in range(count)])
        for _ in range(2)
    ]


@pytest.mark.parametrize("more", [{}, {"has_record": True}, {"cached": 5, "news": 5}], ids=str)
def test_ordinary_flushes_are_for_nobody_else(more):
    world, asked = World(ordinary(**more)), []
    flush_compiled(world.sequences, asked.append, world.broken)
    assert not asked
    assert [(what, whom) for what, whom, _ in world.events] == [("wake", 0), ("wake", 1)]
    assert [len(out.parts) for out in world.outs] == [60, 60]
    assert World(ordinary(**more)).run(flush_compiled) == World(ordinary(**more)).run(flush_each)


def failing(error=None):
    world = World([Link(failing_wakes=1), Link()])
    if error is not None:

        def wake():
            raise error

        world.outs[0].wake = wake
    return world


def test_a_wake_that_fails_is_told_of_and_the_others_go_on():
    world, told = failing(), []
    flush_compiled(world.sequences, world.other, lambda *at: told.append(at))
    ((sequence, error),) = told
    assert sequence is world.sequences[0]
    assert type(error) is OSError
    assert "wake" in [frame.name for frame in traceback.extract_tb(error.__traceback__)], "for the log"
    assert [len(out.parts) for out in world.outs] == [0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_what_is_no_defect_is_not_taken_for_one(error):
    world = failing(error)
    with pytest.raises(type(error)):
        flush_compiled(world.sequences, world.other, world.broken)
    assert not [event for event in world.events if event[0] == "broken"]


@pytest.mark.parametrize("way", [flush_compiled, flush_each], ids=["compiled", "python"])
def test_what_the_callers_raise_ends_it(way):
    def refuse(*_):
        raise LookupError("refused")

    world = failing()
    with pytest.raises(LookupError, match="refused"):
        way(world.items, refuse, refuse)
    assert [len(out.parts) for out in world.outs] == [0, 0]


CHANGES = {
    "grows": lambda items, world: items.append(world.sequences[-1]),
    "shrinks": lambda items, world: items.pop(),
    "is emptied": lambda items, world: items.clear(),
    "is turned": lambda items, world: items.reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", range(5))
def test_the_list_may_change_meanwhile(change, at):
    def play(way):
        world = World(ordinary(4))
        items, asked = world.items[:-3], []

        def other(item):
            if type(item) is Request:
                asked.append(item)
                if len(asked) == at:
                    CHANGES[change](items, world)
            world.other(item)

        way(items, other, world.broken)
        return world.events, world.look(), len(items)

    assert play(flush_compiled) == play(flush_each)


def test_nothing_is_kept_or_lost_of_what_it_was_given():
    world = World(ordinary(10, has_record=True))
    watched = [*world.things, *world.items, *world.outs, None, world.outs[0].wake]
    watched += [encoder._ids for encoder in world.things if isinstance(encoder, SequenceEncoder)]

    def once():
        for at, sequence in enumerate(world.sequences):
            sequence.pending = (10**6,) if at % 2 else [10**6, 1]
        for out in world.outs:
            out.parts.clear()
        flush_compiled(world.sequences, None, None)
        world.events.clear()

    def counts():
        gc.collect()
        return [sys.getrefcount(thing) for thing in watched if thing is not None]

    assert_references_stay(once, counts)
