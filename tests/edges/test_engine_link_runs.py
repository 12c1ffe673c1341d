"""Joined batches: the core comes to the same as with one event per message."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gateway.core.events import BatchReceived
from gateway.edges.engine_link import runs
from gateway.edges.engine_link.counters import LinkCounters
from gateway.edges.engine_link.intake import Intake
from gateway.types import EngineBatch, EngineControl, EngineDead, EngineLoad, EngineNoise, TokenLogprob
from tests.support.core import Bench, wire_id

REQUESTS = 3


def plain(*ids: str, **more: Any) -> EngineBatch:
    columns = {"token_ids": [(1,)] * len(ids), "finish": [""] * len(ids), "engine_index": 0}
    return EngineBatch(ids=list(ids), **(columns | more))


def load(**more: Any) -> EngineLoad:
    return EngineLoad(**({"running": 1, "waiting": 0, "kv_usage": 0.5} | more))


class Side:
    """An intake whose frames hold the messages themselves."""

    def __init__(self, emit=None, joined=lambda: 1):
        self.events: list[Any] = []
        self.counters = LinkCounters()
        env = SimpleNamespace(
            counters=self.counters,
            events=SimpleNamespace(emit=emit or self.events.append),
            limited_log=SimpleNamespace(warning=lambda *_, **__: None),
        )
        protocol = SimpleNamespace(decode_output=lambda frames: frames[0])
        self.intake = Intake(env, protocol, 0, 0, joined=joined)

    def take(self, message, incarnation=1):
        return self.intake.take([SimpleNamespace(bytes=message)], incarnation)

    def drain(self, *messages):
        for message in messages:
            self.take(message)
        self.intake.flush()
        return self.ids

    @property
    def ids(self):
        return [list(event.batch.ids) if type(event) is BatchReceived else type(event) for event in self.events]


def test_plain_batches_are_joined_in_order_and_counted():
    side = Side()
    assert side.drain(plain("a", "b"), plain("a"), plain("c", token_ids=[(7, 8)])) == [["a", "b", "a", "c"]]
    batch = side.events[0].batch
    assert (batch.messages, side.counters.frames) == (3, 3)
    assert (batch.token_ids, batch.finish) == ([(1,), (1,), (1,), (7, 8)], [""] * 4)
    assert (batch.load, batch.completion_tokens) == (None, None)


def test_nothing_is_held_after_a_flush():
    side = Side()
    assert side.drain(plain("a"), plain("b")) == [["a", "b"]]
    assert side.drain(plain("c")) == [["a", "b"], ["c"]]
    assert side.events[1].batch.messages == 1
    side.intake.flush()
    assert len(side.events) == 2


@pytest.mark.parametrize(
    "other",
    [
        plain("x", engine_index=1),
        plain("x", engine_index=None),
        plain("x", fault="bad_row"),
        plain("x", load_fault="bad"),
        plain("x", failed_ids=["y"]),
        plain("x", lossy=True),
        plain("x", logprobs=[[TokenLogprob(-1.0)]]),
        plain("x", cached_tokens=[3]),
        plain("x", prompt_tokens=[3]),
        plain(),
        plain(*["x"] * (runs.MAX_OWN_ROWS + 1)),
    ],
)
def test_what_is_special_stays_apart_and_in_its_place(other):
    side = Side()
    assert side.drain(plain("a"), plain("b"), other, plain("c"), plain("d")) == [["a", "b"], [*other.ids], ["c", "d"]]
    assert side.events[1].batch is other


@pytest.mark.parametrize("other", [EngineNoise("short"), EngineControl(wave_complete=1)])
def test_what_is_no_batch_comes_after_what_came_before(other):
    side = Side()
    side.drain(plain("a"), other, plain("b"))
    assert [ids for ids in side.ids if isinstance(ids, list)] == [["a"], ["b"]]
    assert sum(side.counters.noise.values()) + side.counters.controls == 1


@pytest.mark.parametrize(
    ("first", "second", "is_joined"),
    [
        (None, None, True),
        (load(), load(running=2), True),
        (None, load(), False),
        (load(), None, False),
        (load(taken_at_s=1.0), load(taken_at_s=1.0), True),
        (load(taken_at_s=1.0), load(taken_at_s=0.9), False),
        (load(taken_at_s=1.0), load(), False),
        (load(), load(taken_at_s=1.0), False),
        (load(step_counter=4), load(step_counter=5), True),
        (load(step_counter=4), load(step_counter=3), False),
        (load(step_counter=4), load(step_counter=3, wave=1), True),
        (load(step_counter=4), load(), False),
        (load(taken_at_s=1.0, step_counter=4), load(taken_at_s=2.0, step_counter=3), False),
        (load(), load(source="coordinator"), False),
    ],
)
def test_a_load_that_goes_back_is_never_hidden(first, second, is_joined):
    side = Side()
    got = side.drain(plain("a", load=first), plain("b", load=second))
    assert got == ([["a", "b"]] if is_joined else [["a"], ["b"]])
    assert side.events[-1].batch.load is second
    assert list(side.events[-1].batch.earlier_loads) == ([first] if is_joined and first is not None else [])


def test_counts_are_joined_to_counts_only():
    side = Side()
    counted = [plain("a", completion_tokens=[1]), plain("a", completion_tokens=[2])]
    assert side.drain(*counted, plain("a")) == [["a", "a"], ["a"]]
    assert side.events[0].batch.completion_tokens == [1, 2]
    assert side.events[1].batch.completion_tokens is None


def test_a_request_that_ends_is_known_before_the_next_rows():
    side = Side()
    assert side.drain(plain("a"), plain("a", finish=["stop"]), plain("a"), plain("b", finish=["stop"])) == [
        ["a", "a"],
        ["a", "b"],
    ]


def test_a_joined_batch_is_bounded():
    side = Side()
    many = [plain(*["a"] * runs.MAX_OWN_ROWS) for _ in range(40)]
    assert {len(ids) for ids in side.drain(*many)} == {runs.MAX_ROWS, 40 * runs.MAX_OWN_ROWS % runs.MAX_ROWS}
    assert sum(event.batch.messages for event in side.events) == 40


def test_another_incarnations_rows_stay_apart():
    joined = 2
    side = Side(joined=lambda: joined)
    side.take(plain("a"), 1)
    side.take(plain("b"), 2)
    side.intake.flush()
    assert [(event.incarnation, event.batch.ids) for event in side.events] == [(1, ["a"]), (2, ["b"])]


@pytest.mark.parametrize("later", [plain("b", load=load()), plain("b", lossy=True), EngineControl(wave_complete=1)])
def test_what_the_held_rows_set_off_decides_whose_the_next_message_is(later):
    incarnation: int | None = 1

    def emit(event):
        nonlocal incarnation
        got.append(event.incarnation)
        incarnation = 2

    got: list[int] = []
    side = Side(emit, joined=lambda: incarnation)
    side.take(plain("a"), 1)
    side.take(later, 1)
    side.intake.flush()
    assert got == [1, 2]

    got.clear()
    side.take(plain("a"), 2)
    side.intake._joined = lambda: None
    side.take(later, 2)
    side.intake.flush()
    assert (got, side.counters.early_frames) == ([2], 1)


@pytest.mark.parametrize("later", [plain("b", load=load()), plain("b", lossy=True)])
def test_an_exception_over_the_held_rows_loses_no_later_ones(later):
    def fails_once(event):
        got.append(event.batch.ids)
        if len(got) == 1:
            raise LookupError("a bug in the core")

    got: list[Any] = []
    side = Side(fails_once)
    side.take(plain("a"))
    with pytest.raises(LookupError):
        side.take(later)
    side.intake.flush()
    assert got == [["a"], ["b"]]


def test_the_end_is_told_to_the_caller_who_flushes():
    side = Side()
    assert not side.take(plain("a"))
    assert side.take(EngineDead())
    side.intake.flush()
    assert side.ids == [["a"]]


# --- against one event per message -------------------------------------------------------------------

ROW = st.tuples(
    st.integers(0, REQUESTS),  # the last one is nobody's
    st.integers(0, 3),
    st.sampled_from([""] * 12 + ["stop", "length", "abort"]),
)
LOAD = st.none() | st.builds(
    load,
    running=st.integers(0, 9),
    waiting=st.integers(0, 4),
    kv_usage=st.floats(0.0, 1.0),
    step_counter=st.none() | st.integers(0, 6),
    taken_at_s=st.none() | st.integers(0, 12).map(float),
)
MESSAGE = st.tuples(st.lists(ROW, max_size=4), LOAD, st.sampled_from([0] * 9 + [1]))
DRAINS = st.lists(st.lists(MESSAGE, min_size=1, max_size=12), min_size=1, max_size=4)


def message(ids: list[str], drawn: tuple[Any, ...]) -> EngineBatch:
    rows, report, index = drawn
    return plain(
        *(ids[which] for which, _, _ in rows),
        token_ids=[tuple(range(count)) for _, count, _ in rows],
        finish=[finish for _, _, finish in rows],
        load=report,
        engine_index=index,
    )


class Whole:
    """An intake with a core behind it."""

    def __init__(self, gateways: int, idle: int):
        self.bench = Bench(1, gateways=gateways)
        self.requests = [self.bench.request(max_tokens=400) for _ in range(REQUESTS - idle)]
        self.ids = [wire_id(request) for request in self.requests] + ["orphan"] * (idle + 1)
        self.side = Side(emit=self.bench.send)
        self.left: list[Any] = []

    def drain(self, drawn: Any, *, is_joined: bool) -> None:
        self.bench.now += 0.01
        for each in drawn:
            self.side.take(message(self.ids, each))
            if not is_joined:
                self.side.intake.flush()
        self.side.intake.flush()
        self.left += [(request.handle, tokens) for request, tokens in self.bench.flush()]

    def outcome(self) -> dict[str, Any]:
        bench = self.bench
        router = bench.router
        # The times at which queued messages are read are no steps of the rank; the floor is a bound that never rises.
        apart = {"step_us", "kv_floor_tokens"}
        columns = {name: value for name, value in vars(router.ranks).items() if name not in apart}
        columns = {name: value for name, value in columns.items() if isinstance(value, list | int | float)}
        counters = router.counters
        loads = router._intake._load
        return {
            "left": self.left,
            "ended": [request.handle for request in bench.ended],
            # Strays are told to stop after what ended in the same batch.
            "aborted": sorted((each.rank, each.incarnation, wire) for each in bench.aborted for wire in each.wire_ids),
            "columns": columns,
            "counters": {name: getattr(counters, name) for name in type(counters).__slots__},
            "loads": (loads._last_step, loads._last_taken_at, loads._own_at_receipt, loads.foreign),
            "in flight": [*router._intake._ledger.by_rank[0]],
            "link": (self.side.counters.frames, self.side.counters.index_mismatch),
        }


@settings(max_examples=80, deadline=None)
@given(drains=DRAINS, gateways=st.sampled_from([1, 2]), idle=st.sampled_from([0, 0, REQUESTS]))
def test_joined_messages_come_to_the_same_as_single_ones(drains, gateways, idle):
    single, joined = Whole(gateways, idle), Whole(gateways, idle)
    messages = sum(len(drain) for drain in drains)
    for drain in drains:
        single.drain(drain, is_joined=False)
        joined.drain(drain, is_joined=True)
        assert joined.outcome() == single.outcome()
    assert joined.bench.router.counters.batches == [messages]
    event(f"idle={idle}")


def test_joined_reports_are_judged_one_by_one_where_a_later_one_is_stored():
    """The coordinator's report overtook some of the reports that come with the rows."""
    for first in (1.0, 3.0):
        got = []
        for is_joined in (False, True):
            whole = Whole(1, 0)
            whole.bench.router._intake._load._last_taken_at[0] = 2.0
            reports = [load(running=at, taken_at_s=first + at / 2) for at in range(6)]
            drawn = [([(0, 1, "")], report, 0) for report in reports]
            whole.drain(drawn, is_joined=is_joined)
            got.append(whole.outcome())
        assert got[0] == got[1]
        assert got[1]["counters"]["step_regressions"] == (2 if first == 1.0 else 0)


def test_a_step_is_the_gap_divided_by_the_messages():
    whole = Whole(1, 0)
    row = [([(which, 1, "")], None, 0) for which in range(REQUESTS)]
    whole.drain(row, is_joined=True)
    whole.drain(row[:1] * 4, is_joined=True)
    assert whole.bench.router.ranks.step_us == [2500]
