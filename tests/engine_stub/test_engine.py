import msgspec
import pytest

from engine_stub.config import LoadReports, Model, StubConfig
from engine_stub.engine import Fate
from engine_stub.faults import Faults, WireForm, changed
from engine_stub.scheduler import SchedulerConfig
from engine_stub.wire.codec import Consequence, Load
from tests.support.stub_engine import EngineDriver, finishes_of, read_batch, tokens_of

FAMILIES = ("tokenspeed", "vllm")
SMALL = SchedulerConfig(max_active=2, kv_tokens=400, block_size=4)


@pytest.fixture(params=FAMILIES)
def protocol(request):
    return request.param


def with_load(**fields):
    return StubConfig(scheduler=SMALL, load=LoadReports(**fields))


def test_tokens_are_the_published_stream_and_one_batch_carries_all_rows(protocol):
    driver = EngineDriver(protocol)
    driver.add("a", prompt_len=4, max_tokens=5)
    driver.add("b", prompt_len=6, max_tokens=3, seed=7)
    batches = driver.run()
    assert tokens_of(batches, "a") == driver.expected(4, 5)
    assert tokens_of(batches, "b") == driver.expected(6, 3, seed=7)
    assert [len(batch.rows) for batch in batches if batch.rows] == [2, 2, 2, 1, 1]
    assert finishes_of(batches, "a") == finishes_of(batches, "b") == ["length"]
    assert driver.engine.live_ids == frozenset()
    assert driver.records.tokens == 8


class TestSnapshots:
    """Two slots, three requests of 3, 2 and 2 tokens: the third waits for a slot."""

    @staticmethod
    def loads(driver):
        for name, max_tokens in (("a", 3), ("b", 2), ("c", 2)):
            driver.add(name, max_tokens=max_tokens)
        return [(batch.load[:2] if batch.load else None, [row.id for row in batch.rows]) for batch in driver.run()]

    def test_tokenspeed_counts_residents_before_the_commit(self):
        assert self.loads(EngineDriver("tokenspeed", with_load())) == [
            ((3, 1), ["a", "b"]),
            ((3, 1), ["a", "b"]),  # b ended in this very batch
            ((2, 0), ["a", "c"]),
            ((1, 0), ["c"]),  # the last report overstates: nothing runs any more
        ]

    def test_vllm_counts_apart_after_the_commit_and_says_when_it_is_dry(self):
        assert self.loads(EngineDriver("vllm", with_load())) == [
            ((2, 1), ["a", "b"]),
            ((1, 1), ["a", "b"]),
            ((1, 0), ["a", "c"]),
            ((0, 0), ["c"]),
            ((0, 0), []),
        ]

    def test_timing_semantics_and_the_trailing_batch_are_settings(self):
        config = with_load(snapshot="after_commit", semantics="disjoint", trailing=True)
        assert self.loads(EngineDriver("tokenspeed", config)) == self.loads(EngineDriver("vllm", with_load()))
        config = with_load(snapshot="before_commit", semantics="resident", trailing=False)
        assert self.loads(EngineDriver("vllm", config)) == self.loads(EngineDriver("tokenspeed", with_load()))

    def test_none_reports_nothing(self, protocol):
        driver = EngineDriver(protocol, with_load(snapshot="none"))
        assert [load for load, _ in self.loads(driver)] == [None] * 4

    def test_kv_usage_is_of_whole_blocks(self, protocol):
        driver = EngineDriver(protocol, with_load())
        driver.add("a", prompt_len=9, max_tokens=5)
        assert driver.step().load[2] == 3 / 100
        assert driver.records.reported_loads[-1] == Load(1, 0, 3, 100)

    def test_a_request_that_arrives_while_a_step_runs_is_not_in_its_report(self, protocol):
        driver = EngineDriver(protocol, with_load())
        driver.add("a")
        driver.engine.begin()
        driver.add("b")
        assert driver.engine.live_ids == {"a", "b"}
        assert read_batch(driver.engine.finish(0.0)[0]).load[:2] == (1, 0)


def test_a_step_without_rows_is_silent_on_tokenspeed_and_stats_only_on_vllm(protocol):
    config = StubConfig(scheduler=SchedulerConfig(token_budget=8))
    driver = EngineDriver(protocol, config)
    driver.add("a", prompt_len=12, max_tokens=1)
    first = driver.step()
    if protocol == "tokenspeed":
        assert first is None
    else:
        assert (first.rows, first.load[:2]) == ([], (1, 0))
    assert [row.finish for row in driver.step().rows] == ["length"]


def test_an_idle_engine_is_silent(protocol):
    driver = EngineDriver(protocol)
    assert driver.run() == []
    driver.add("a", max_tokens=1)
    driver.run()
    assert driver.run() == []


class TestAborts:
    @pytest.mark.parametrize("when", ["in the inbox", "waiting", "running", "while the step runs"])
    def test_an_abort_ends_a_request_without_a_row(self, protocol, when):
        driver = EngineDriver(protocol, StubConfig(scheduler=SchedulerConfig(max_active=1)))
        driver.add("other" if when == "waiting" else "a", max_tokens=50)
        if when == "in the inbox":
            driver.abort("a")
        elif when == "while the step runs":
            driver.step()
            driver.engine.begin()
            driver.abort("a")
            assert not [row for frames in driver.engine.finish(0.0) for row in read_batch(frames).rows]
        else:
            driver.add("a", max_tokens=50)
            driver.step()
            driver.abort("a")
        assert "a" not in driver.engine.live_ids
        driver.abort("other")
        assert not [row for batch in driver.run() for row in batch.rows]
        assert driver.engine.scheduler.pool.used == 0

    def test_unknown_ids_are_harmless(self, protocol):
        driver = EngineDriver(protocol)
        driver.abort("never", "heard", "of")
        assert list(driver.records.received_aborts) == ["never", "heard", "of"]
        assert driver.records.bad == 0

    def test_vllm_says_that_it_ran_dry_after_an_abort(self):
        driver = EngineDriver("vllm")
        driver.add("a", max_tokens=50)
        driver.step()
        driver.abort("a")
        assert [(batch.rows, batch.load[:2]) for batch in driver.run()] == [([], (0, 0))]

    def test_tokenspeed_ends_a_later_request_of_an_aborted_id(self):
        driver = EngineDriver("tokenspeed")
        driver.abort("a")
        driver.now = 59.0
        driver.add("a")
        assert finishes_of(driver.run(), "a") == ["abort"]
        assert driver.records.bad == 1
        driver.abort("b")
        driver.now = 120.0
        driver.add("b")
        assert finishes_of(driver.run(), "b") == ["length"], "the memory ends"

    def test_the_first_aborts_can_be_ignored(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(ignore_aborts=1))
        driver.add("a", max_tokens=4)
        driver.step()
        driver.abort("a")
        driver.step()
        assert driver.engine.live_ids == {"a"}
        driver.abort("a")
        assert driver.engine.live_ids == frozenset()
        assert driver.records.aborts == 2


class TestRefusals:
    def test_a_bad_request_gets_a_terminal_row_and_is_remembered(self, protocol):
        driver = EngineDriver(protocol, StubConfig(model=Model(vocab_size=4)))
        driver.add("bad", prompt_len=4)
        driver.add("good", prompt_len=2)
        batches = driver.run()
        assert finishes_of(batches, "bad") == ["abort" if protocol == "tokenspeed" else "error"]
        assert finishes_of(batches, "good") == ["length"]
        (bad,) = driver.records.bad_inputs
        assert (bad.request_id, "vocabulary" in bad.reason) == ("bad", True)
        assert [request.id for request in driver.records.received_adds] == ["bad", "good"]

    def test_a_terminal_row_needs_no_running_work(self, protocol):
        driver = EngineDriver(protocol)
        driver.add("bad", prompt_len=0)
        assert "bad" in driver.engine.live_ids
        assert [row.id for row in driver.step().rows] == ["bad"]
        assert driver.engine.live_ids == frozenset()

    @pytest.mark.parametrize("after_steps", [0, 1])
    def test_a_duplicate_id_ends_in_a_row_and_the_first_one_goes_on(self, protocol, after_steps):
        driver = EngineDriver(protocol)
        driver.add("a", max_tokens=4)
        for _ in range(after_steps):
            driver.step()
        driver.add("a", prompt_len=9)
        batches = driver.run()
        assert sorted(finishes_of(batches, "a")) == sorted(["abort" if protocol == "tokenspeed" else "error", "length"])
        assert driver.records.bad == 1

    def test_a_full_queue_answers_abort(self, protocol):
        driver = EngineDriver(protocol, StubConfig(scheduler=SchedulerConfig(max_active=1, max_queue_depth=1)))
        for name in "abc":
            driver.add(name)
        batches = driver.run()
        assert [finishes_of(batches, name) for name in "abc"] == [["length"], ["length"], ["abort"]]
        assert driver.records.bad == 0, "load is not the gateway's fault"

    def test_what_cannot_be_read_is_dropped_and_remembered(self, protocol):
        driver = EngineDriver(protocol)
        driver.engine.receive([b"\x09", b"?"], 0.0)
        driver.add("a")
        assert finishes_of(driver.run(), "a") == ["length"]
        assert driver.engine.fate is Fate.ALIVE
        assert driver.records.bad == 1


class TestStrictVllm:
    @staticmethod
    def driver():
        return EngineDriver("vllm", StubConfig(model=Model(vocab_size=100), strict_vllm=True))

    def test_garbage_deafens(self):
        driver = self.driver()
        driver.engine.receive([b"\x00", b"\xc1"], 0.0)
        assert driver.engine.fate is Fate.DEAF

    def test_a_negative_temperature_deafens_and_gets_no_row(self):
        driver = self.driver()
        driver.add("a", temperature=-1.0)
        assert driver.engine.fate is Fate.DEAF
        assert driver.run() == []
        assert driver.records.bad_inputs[0].consequence is Consequence.DEAF

    def test_a_foreign_token_kills(self):
        driver = self.driver()
        driver.add("a", prompt_len=100)
        assert driver.engine.fate is Fate.DEAD

    def test_a_duplicate_kills_when_it_is_scheduled(self):
        driver = self.driver()
        driver.add("a")
        driver.step()
        driver.add("a")
        assert driver.engine.begin() is None
        assert driver.engine.fate is Fate.DEAD

    def test_tokenspeed_is_never_strict(self):
        driver = EngineDriver("tokenspeed", StubConfig(model=Model(vocab_size=4), strict_vllm=True))
        driver.add("a")
        assert driver.engine.fate is Fate.ALIVE


class TestFaults:
    def test_silent_takes_work_and_never_answers(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(silent=True))
        driver.add("a")
        assert driver.step() is None
        assert driver.engine.live_ids == {"a"}
        driver.abort("a")
        assert driver.engine.live_ids == frozenset()
        driver.add("b")
        driver.engine.faults = Faults()
        assert finishes_of(driver.run(), "b") == ["length"]

    def test_death_comes_after_the_given_number_of_tokens(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(die_at_token=3))
        driver.add("a", max_tokens=9)
        dying = []
        for _ in range(3):
            dying.append(driver.engine.is_dying)
            driver.step()
        assert [*dying, driver.engine.is_dying] == [False, False, False, True]

    def test_a_final_without_tokens_follows_its_last_token(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(final_without_tokens=True))
        driver.add("a", max_tokens=2)
        batches = driver.run()
        rows = [row for batch in batches for row in batch.rows]
        assert [(row.tokens != [], row.finish) for row in rows] == [(True, ""), (True, ""), (False, "length")]
        assert tokens_of(batches, "a") == driver.expected(count=2)

    def test_a_pending_final_can_be_aborted(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(final_without_tokens=True))
        driver.add("a", max_tokens=1)
        driver.step()
        assert driver.engine.live_ids == {"a"}
        driver.abort("a")
        assert driver.engine.live_ids == frozenset()
        assert not finishes_of(driver.run(), "a")

    def test_never_final(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(never_final=True))
        driver.add("a", max_tokens=2)
        batches = driver.run()
        assert tokens_of(batches, "a") == driver.expected(count=2)
        assert finishes_of(batches, "a") == []

    def test_dropped_tokens_are_still_counted(self):
        driver = EngineDriver("tokenspeed", faults=Faults(drop_tokens_every=2))
        driver.add("a", max_tokens=4)
        rows = [row for batch in driver.run() for row in batch.rows]
        assert [(len(row.tokens), row.completion) for row in rows] == [(1, 1), (0, 2), (1, 3), (0, 4)]
        assert rows[-1].finish == "length"

    def test_duplicated_batches(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(duplicate_every=2))
        driver.add("a", max_tokens=2)
        first, second = driver.step_raw(), driver.step_raw()
        assert (len(first), len(second)) == (1, 2)
        assert second[0] == second[1]

    def test_a_wrong_engine_index(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(engine_index=7))
        driver.add("a")
        assert driver.step().engine_index == 7

    @pytest.mark.parametrize("size", [9, 10])
    def test_old_batches(self, size):
        driver = EngineDriver("tokenspeed", faults=Faults(wire=WireForm(tokenspeed_batch=size)))
        driver.add("a")
        batch = driver.step()
        assert len(batch.raw) == size
        assert batch.load is None

    @pytest.mark.parametrize(
        ("fault", "tokenspeed", "vllm"),
        [
            ("drop", [0, 0, 0, 0], None),
            ("negative", [-1, 0, 1, 100], -1),
            ("float", [1.5, 0, 1, 100], 1.5),
            ("text", ["many", 0, 1, 100], "many"),
            ("short", [1, 0], 1),
            ("overfull", [1, 0, 200, 100], 1),
        ],
    )
    def test_bad_load_leaves_the_rows_right(self, fault, tokenspeed, vllm):
        for protocol in FAMILIES:
            driver = EngineDriver(protocol, with_load(), Faults(load=fault))
            driver.add("a")
            messages = driver.step_raw()
            raw = msgspec.msgpack.decode(messages[0][0])
            if protocol == "tokenspeed":
                assert raw[10:] == tokenspeed
                assert raw[2] == [driver.expected(count=1)]
            else:
                assert (raw[2] and raw[2]["num_running_reqs"]) == vllm
                assert ("kv_cache_usage" in (raw[2] or {})) is (fault not in ("drop", "short"))
                assert raw[1][0][1] == driver.expected(count=1)

    @pytest.mark.parametrize("kind", ["noise", "foreign_tag", "empty"])
    def test_garbage_beside_a_batch_leaves_the_batch_whole(self, protocol, kind):
        driver = EngineDriver(protocol, faults=Faults(garbage_every=2, garbage_kind=kind))
        driver.add("a", max_tokens=2)
        assert len(driver.step_raw()) == 1
        garbage, batch = driver.step_raw()
        assert [row.finish for row in read_batch(batch).rows] == ["length"]
        assert garbage != batch

    def test_a_truncated_batch_cannot_be_decoded(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(garbage_every=1, garbage_kind="truncate"))
        driver.add("a")
        ((payload,),) = driver.step_raw()
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(payload)

    def test_a_ragged_batch_decodes_and_lacks_tokens(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(garbage_every=1, garbage_kind="ragged"))
        driver.add("a")
        ((payload,),) = driver.step_raw()
        raw = msgspec.msgpack.decode(payload)
        assert raw[1:3] == [["a"], []] if protocol == "tokenspeed" else raw[1] == [["a"]]

    def test_a_replaced_batch_is_gone(self, protocol):
        driver = EngineDriver(protocol, faults=Faults(garbage_every=2, garbage_kind="replace"))
        driver.add("a", max_tokens=2)
        assert len(driver.step_raw()) == 1
        ((payload,),) = driver.step_raw()
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(payload)

    def test_faults_are_checked_when_they_are_set(self):
        assert changed(Faults(silent=True), {"die_at_token": 5}) == Faults(silent=True, die_at_token=5)
        assert changed(Faults(), {"wire": {"tokenspeed_batch": 9}}).wire == WireForm(tokenspeed_batch=9)
        for wrong in ({"die_at_tokens": 5}, {"die_at_token": 0}, {"load": "nice"}, {"stall": "yes"}):
            with pytest.raises(msgspec.ValidationError):
                changed(Faults(), wrong)


def test_logprobs_ride_on_the_rows():
    driver = EngineDriver("tokenspeed")
    driver.add("a", max_tokens=2, logprobs=1)
    driver.add("b", max_tokens=2)
    batches = driver.run()
    assert [len(batch.raw[7][0]) for batch in batches] == [1, 1]
    assert [batch.raw[7][1] for batch in batches] == [[], []]
    assert [batch.raw[8][0] for batch in batches] == [batch.rows[0].tokens for batch in batches]


def test_scripted_batches_say_what_the_test_says(protocol):
    driver = EngineDriver(protocol, faults=Faults(silent=True))
    driver.add("a")
    frames = driver.engine.scripted([("a", [1, 2], ""), ("stranger", [3], "stop")], Load(2, 5, 100, 400), 0.0)
    batch = read_batch(frames)
    assert [row[:3] for row in batch.rows] == [("a", [1, 2], ""), ("stranger", [3], "stop")]
    assert batch.load == (2, 5, 0.25)
    assert driver.engine.live_ids == {"a"}
    batch = read_batch(driver.engine.scripted([("a", [4], "length")], None, 0.0))
    assert batch.rows[0].completion in (3, None)
    assert batch.load is None
    assert driver.engine.live_ids == frozenset()


def test_abort_all_ends_every_request_with_a_row(protocol):
    driver = EngineDriver(protocol, StubConfig(scheduler=SchedulerConfig(max_active=1)))
    for name in "abc":
        driver.add(name, max_tokens=50)
    driver.step()
    driver.add("d")
    (frames,) = driver.engine.abort_all(0.0)
    assert {row.id: row.finish for row in read_batch(frames).rows} == dict.fromkeys("abcd", "abort")
    assert driver.engine.live_ids == frozenset()
    assert driver.engine.abort_all(0.0) == []
