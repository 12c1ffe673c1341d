"""The invariants of an iteration-level scheduler with a growing batch, A1 to A13, on the `aprender` profile."""

import json

import msgspec
import pytest

from engine_stub.backend import BackendInfo
from engine_stub.config import StubConfig, load_config
from engine_stub.effective import ceiling_reason, effective_config
from engine_stub.scheduler import Admission
from engine_stub.telemetry import Telemetry
from tests.engine_stub.test_profiles import profile
from tests.support.paged_model import PagedDriver, expected
from tests.support.stub_engine import EngineDriver, finishes_of, tokens_of
from tests.support.stub_scheduler import request

FAMILIES = ("tokenspeed", "vllm")


def aprender(**changes):
    return PagedDriver(profile("aprender", **changes))


def names(plan):
    return [chunk.sequence.id for chunk in plan.prefills]


def submitted(driver, *ids, max_tokens=6):
    requests = {name: request(name, prompt_len=5, max_tokens=max_tokens) for name in ids}
    driver.submit(*requests.values())
    return requests


class TestGrowth:
    def test_a1_the_initial_batch_is_one_whatever_waits(self):
        driver = aprender()
        submitted(driver, *"abcd")
        assert names(driver.step()) == ["a"]
        assert driver.scheduler.active_count == 1

    def test_a1_the_others_join_one_per_iteration(self):
        driver = aprender()
        submitted(driver, *"abcd")
        assert [names(driver.step()) for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]
        assert [driver.row_steps[name][0] for name in "abcd"] == [1, 2, 3, 4], "a slot's first token costs an iteration"

    def test_a2_first_come_first_served(self):
        driver = aprender(max_active=2)
        submitted(driver, *"abcdef")
        driver.run()
        starts = [driver.row_steps[name][0] for name in "abcdef"]
        assert starts == sorted(starts)

    def test_a2_what_waits_in_the_scheduler_goes_before_what_arrives(self):
        config = load_config("aprender", None, {"scheduler.max_active": 1, "time_scale": 0}, {})
        driver = EngineDriver("tokenspeed", config)
        driver.add("a", max_tokens=2)
        driver.add("b", max_tokens=2)
        driver.step()
        driver.add("c", max_tokens=2)
        ended = [row.id for batch in driver.run() for row in batch.rows if row.finish]
        assert ended == ["a", "b", "c"]

    def test_a3_done_slots_are_refilled_in_index_order_in_one_prefill(self):
        driver = aprender(max_active=3)
        requests = {name: request(name, prompt_len=5, max_tokens=6 - place) for place, name in enumerate("abc")}
        driver.submit(*requests.values())
        for _ in range(6):
            driver.step()  # a: iterations 1-6, b: 2-6, c: 3-6: all end together
        submitted(driver, *"defg")
        plan = driver.step()
        assert names(plan) == ["d", "e", "f"]
        assert [chunk.sequence.slot for chunk in plan.prefills] == [0, 1, 2]
        assert plan.prefill_tokens == 3 * 4

    def test_a3_the_batch_does_not_grow_while_a_slot_is_done(self):
        driver = aprender(max_active=4)
        submitted(driver, "a", "b", max_tokens=4)
        for _ in range(4):
            driver.step()
        assert driver.scheduler.sequence("a") is None
        submitted(driver, "c")
        plan = driver.step()
        assert [(chunk.sequence.id, chunk.sequence.slot) for chunk in plan.prefills] == [("c", 0)]

    def test_a3_at_most_one_slot_is_added_when_all_done_ones_are_refilled(self):
        driver = aprender(max_active=8)
        submitted(driver, "a", "b", max_tokens=4)
        for _ in range(4):
            driver.step()  # a is done, b has one token to go
        submitted(driver, *"cdef")
        plan = driver.step()
        assert [(chunk.sequence.id, chunk.sequence.slot) for chunk in plan.prefills] == [("c", 0), ("d", 2)]
        plan = driver.step()
        assert [(chunk.sequence.id, chunk.sequence.slot) for chunk in plan.prefills] == [("e", 1), ("f", 3)]

    def test_a4_the_batch_ends_when_all_is_done_and_nothing_waits(self):
        driver = aprender()
        submitted(driver, *"abc", max_tokens=3)
        driver.run()
        submitted(driver, *"de")
        plan = driver.step()
        assert [(chunk.sequence.id, chunk.sequence.slot) for chunk in plan.prefills] == [("d", 0)]

    def test_a4_with_something_waiting_slots_are_refilled_not_restarted(self):
        driver = aprender(max_active=2)
        submitted(driver, "a", max_tokens=3)
        driver.step()
        submitted(driver, "b", max_tokens=2)
        driver.step()
        driver.step()
        assert driver.scheduler.active_count == 0
        submitted(driver, "c", "d")
        assert names(driver.step()) == ["c", "d"], "a new batch would have started with c alone"


class TestIteration:
    def test_a5_the_prefill_takes_all_but_the_last_token_and_the_decode_yields_the_first(self):
        driver = aprender()
        requests = submitted(driver, "a", max_tokens=3)
        plan = driver.step()
        assert (plan.prefill_tokens, plan.decode_rows) == (4, 1)
        assert driver.tokens["a"] == expected(requests["a"])[:1]

    def test_a5_a_prompt_of_one_token_needs_no_prefill(self):
        driver = aprender()
        driver.submit(request("a", prompt_len=1))
        plan = driver.step()
        assert (plan.prefill_tokens, plan.decode_rows) == (0, 1)

    def test_a6_requests_come_and_go_while_the_model_runs(self):
        driver = aprender()
        requests = submitted(driver, *"ab")
        driver.step()
        seen = []

        def meanwhile():
            seen.append(driver.submit(request("c", prompt_len=5))[0])
            seen.append(driver.scheduler.abort("b"))

        driver.step(between=meanwhile)
        driver.run()
        assert seen == [Admission.ADMITTED, True]
        assert driver.tokens["a"] == expected(requests["a"])
        assert driver.finishes == {"a": ["length"], "c": ["length"]}

    def test_a7_a_stream_ends_in_the_iteration_that_finishes_it(self):
        driver = aprender()
        submitted(driver, "short", "long", max_tokens=4)
        driver.submit(request("longer", prompt_len=5, max_tokens=20))
        driver.run()
        assert driver.row_steps["short"][-1] == 4
        assert driver.row_steps["longer"][-1] > 15

    @pytest.mark.parametrize("protocol", FAMILIES)
    def test_a10_a_client_that_is_gone_frees_its_slot(self, protocol):
        driver = EngineDriver(protocol, load_config("aprender", None, {"scheduler.max_active": 1}, {}))
        driver.add("gone", max_tokens=50)
        driver.add("next", max_tokens=2)
        driver.step()
        driver.abort("gone")
        assert finishes_of(driver.run(), "next") == ["length"]

    def test_a12_in_flight_is_the_schedulers_own_count_on_every_way_out(self):
        driver = aprender(max_active=3)
        telemetry = Telemetry(driver.scheduler, driver.backend.info)
        submitted(driver, *"abcd")
        seen = []
        for _ in range(4):
            driver.step()
            seen.append(telemetry.active_now)
        driver.scheduler.abort("b")
        seen.append(telemetry.active_now)
        driver.scheduler.fail(driver.scheduler.plan())
        seen.append(telemetry.active_now)
        assert seen == [1, 2, 3, 3, 2, 0]


class Flaky:
    """Raises when the plan has what `fails` looks for; everything else is computed."""

    def __init__(self, backend, fails):
        self.name, self.info = backend.name, backend.info
        self.fails = fails
        self._backend = backend

    def forward(self, plan):
        if self.fails(plan):
            raise RuntimeError("a kernel failed")
        return self._backend.forward(plan)


@pytest.mark.parametrize("protocol", FAMILIES)
class TestFailures:
    """A8 and A9: a failure ends what it touches; the loop survives."""

    @staticmethod
    def driver(protocol, fails, **scheduler):
        overrides = {f"scheduler.{name}": value for name, value in scheduler.items()}
        driver = EngineDriver(protocol, load_config("aprender", None, overrides, {}))
        driver.engine.backend = Flaky(driver.engine.backend, fails)
        return driver

    @staticmethod
    def error(protocol):
        return "abort" if protocol == "tokenspeed" else "error"

    def test_a8_a_decode_failure_ends_every_live_slot_and_the_loop_goes_on(self, protocol):
        driver = self.driver(protocol, lambda plan: len(plan.decodes) == 2)
        driver.add("a", max_tokens=9)
        driver.add("b", max_tokens=9)
        batches = driver.run()
        assert finishes_of(batches, "a") == finishes_of(batches, "b") == [self.error(protocol)]
        assert tokens_of(batches, "a") == driver.expected(count=2), "what was delivered is right"
        assert driver.engine.scheduler.pool.used == 0
        driver.add("c", max_tokens=4)
        batches = driver.run()
        assert tokens_of(batches, "c") == driver.expected(count=4)
        assert finishes_of(batches, "c") == ["length"]
        assert driver.engine.report()["failed"] == 2

    def test_a9_a_setup_failure_ends_all_requests_of_the_batch(self, protocol):
        driver = self.driver(protocol, lambda plan: bool(plan.prefills), max_active=2)
        driver.add("a")
        assert finishes_of(driver.run(), "a") == [self.error(protocol)]

    def test_a9_a_join_failure_ends_the_joiner_only(self, protocol):
        driver = self.driver(protocol, lambda plan: any(chunk.sequence.id == "joiner" for chunk in plan.prefills))
        driver.add("a", max_tokens=6)
        driver.step()
        driver.add("joiner", max_tokens=6)
        batches = driver.run()
        assert finishes_of(batches, "joiner") == [self.error(protocol)]
        assert finishes_of(batches, "a") == ["length"]
        assert tokens_of(batches, "joiner") == []

    def test_a9_a_recycle_failure_ends_the_group_and_its_slots_stay_usable(self, protocol):
        bad = {"c", "d"}
        driver = self.driver(protocol, lambda plan: bad <= {chunk.sequence.id for chunk in plan.prefills}, max_active=3)
        driver.add("a", max_tokens=3)
        driver.add("b", max_tokens=2)
        driver.add("running", max_tokens=12)
        for _ in range(3):
            driver.step()
        for name in "cde":
            driver.add(name, max_tokens=2)
        batches = driver.run()
        assert finishes_of(batches, "c") == finishes_of(batches, "d") == [self.error(protocol)]
        assert finishes_of(batches, "running") == finishes_of(batches, "e") == ["length"]
        assert driver.engine.scheduler.pool.used == 0

    def test_the_failure_is_logged_with_the_ids(self, protocol, caplog):
        driver = self.driver(protocol, lambda plan: bool(plan.decodes))
        driver.add("a")
        driver.run()
        (record,) = [record for record in caplog.records if record.getMessage() == "forward_failed"]
        assert record.ids == ["a"]
        assert "a kernel failed" in str(record.exc_info[1])


class TestReport:
    """A11: one key set, unmeasured is null, what can't exist is a number with its reason."""

    INFO = BackendInfo(name="x", numerics="exact", batch_invariant=True, kv_bytes_per_token=1536, recipe={"a": 1})

    def report(self, name="aprender", telemetry=None, **overrides):
        overrides = {f"scheduler.{key}": value for key, value in overrides.items()}
        return effective_config(load_config(name, None, overrides, {}), self.INFO, telemetry)

    def test_the_aprender_report(self):
        report = self.report()
        assert report["kind"] == "iteration"
        assert report["max_in_flight"] == report["slots_admitted"] == report["max_slots"] == 16
        assert (report["window_ms"], report["admission_policy"]) == (0, "queue")
        assert (report["token_budget"], report["prefill_chunk_size"]) == (None, None)
        assert (report["in_flight_now"], report["in_flight_peak"]) == (None, None), "0 would read as idle"
        assert report["weights"] == {"bytes": None, "budget_bytes": None}
        assert report["speculative_tokens"] == {"value": 0, "reason": "there is no draft model"}
        assert report["lock_contended"] is False

    def test_the_key_set_is_the_same_for_every_profile_and_backend(self):
        driver = aprender()
        live = Telemetry(driver.scheduler, driver.backend.info)
        keys = {
            frozenset(self.report(name, telemetry))
            for name in ("default", "dgr012", "sarathi")
            for telemetry in (None, live)
        }
        assert len(keys) == 1

    def test_live_figures(self):
        driver = aprender()
        telemetry = Telemetry(driver.scheduler, driver.backend.info)
        submitted(driver, *"ab", max_tokens=3)
        while (plan := driver.step()) is not None:
            telemetry.observe(plan, 0.0)
        report = self.report(telemetry=telemetry)
        assert (report["in_flight_now"], report["in_flight_peak"]) == (0, 2)

    def test_it_is_json(self):
        for name in ("default", "sarathi"):
            report = self.report(name)
            assert json.loads(msgspec.json.encode(report)) == report

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({}, "default"),
            ({"max_active": 4}, "env"),
            ({"kv_tokens": 1600}, "kv_budget"),
            ({"scratch_bytes": 100, "scratch_bytes_per_session": 10}, "scratch_budget"),
        ],
    )
    def test_what_bounds_admission(self, settings, reason):
        config = load_config("default", None, {f"scheduler.{name}": value for name, value in settings.items()}, {})
        assert ceiling_reason(config.scheduler) == reason

    def test_a_token_budget_is_a_number_or_null(self):
        assert self.report("sarathi")["token_budget"] == 512
        assert self.report("sarathi", token_budget=0)["token_budget"] is None


class TestShortCut:
    """A13: a lone sequence is planned without looking at anything else, unless that is forced."""

    def test_it_is_taken_while_one_sequence_decodes_and_nothing_waits(self):
        driver = aprender()
        submitted(driver, "a")
        driver.run()
        assert (driver.scheduler.short_cuts, driver.scheduler.steps) == (5, 6)

    def test_it_is_not_taken_when_forced(self):
        driver = aprender(force_batched=True)
        requests = submitted(driver, "a")
        driver.run()
        assert driver.scheduler.short_cuts == 0
        assert driver.tokens["a"] == expected(requests["a"])

    def test_a_second_arrival_does_not_wait_for_the_first_generation(self):
        driver = aprender()
        submitted(driver, "a", max_tokens=50)
        for _ in range(10):
            driver.step()
        submitted(driver, "b")
        assert names(driver.step()) == ["b"]
        assert driver.row_steps["b"] == [11]

    def test_it_is_not_taken_while_something_waits(self):
        driver = aprender(max_active=1)
        submitted(driver, "a", "b", max_tokens=4)
        for _ in range(4):
            driver.step()
        assert driver.scheduler.short_cuts == 0


def test_the_queue_is_bounded_where_the_scheduler_holds_it():
    driver = aprender(max_active=1, max_queue_depth=2)
    reasons = [driver.submit(request(f"r{number}"))[0] for number in range(5)]
    assert reasons[-1] is Admission.REJECTED_QUEUE_FULL
    assert driver.scheduler.live_count == 3


def test_a_slow_reader_loses_nothing_because_rows_are_never_dropped():
    config = load_config("aprender", None, {}, {})
    assert isinstance(config, StubConfig)
    driver = EngineDriver("tokenspeed", config)
    driver.add("a", max_tokens=200)
    kept = []
    while (messages := driver.step_raw()) is not None:
        kept += messages  # nobody reads until the end
    from tests.support.stub_engine import read_batch

    assert tokens_of([read_batch(frames) for frames in kept], "a") == driver.expected(count=200)
