"""The six admission reasons: each alone, their precedence, and how a refusal reaches the outside."""

import logging

import msgspec
import pytest

from engine_stub.config import Model, StubConfig
from engine_stub.scheduler import Admission, SchedulerConfig
from engine_stub.scheduler.admission import never_fits
from tests.support.stub_engine import EngineDriver, finishes_of
from tests.support.stub_scheduler import Driver, request

FAMILIES = ("tokenspeed", "vllm")
MODES = ("single", "reserve", "optimistic")


def small(mode="single", **fields):
    settings = {"max_active": 1, "max_queue_depth": 1, "kv_tokens": 64, "block_size": 4, "kv_admission": mode}
    return settings | fields


def reason_of(driver, req):
    (reason,) = driver.submit(req)
    return reason.value


@pytest.mark.parametrize("mode", MODES)
class TestEachAlone:
    def test_admitted(self, mode):
        assert reason_of(Driver(**small(mode)), request("a")) == "ADMITTED"

    def test_queued(self, mode):
        driver = Driver(**small(mode))
        driver.submit(request("a"))
        assert reason_of(driver, request("b")) == "QUEUED"

    def test_queue_full_until_a_slot_frees(self, mode):
        driver = Driver(**small(mode))
        driver.submit(request("a"), request("b"))
        assert reason_of(driver, request("c")) == "REJECTED_QUEUE_FULL"
        while driver.scheduler.sequence("a") is not None:
            driver.step()
        assert reason_of(driver, request("c")) == "QUEUED", "b has the slot and c its place"

    def test_a_queue_of_no_depth_admits_what_a_slot_takes(self, mode):
        driver = Driver(**small(mode, max_queue_depth=0))
        assert reason_of(driver, request("a")) == "ADMITTED"
        assert reason_of(driver, request("b")) == "REJECTED_QUEUE_FULL"
        driver.run()
        assert reason_of(driver, request("b")) == "ADMITTED"

    def test_kv_budget(self, mode):
        assert reason_of(Driver(**small(mode)), request("a", prompt_len=60, max_tokens=6)) == "REJECTED_KV_BUDGET"

    def test_scratch_budget(self, mode):
        driver = Driver(**small(mode, scratch_bytes=99, scratch_bytes_per_session=100))
        assert driver.scheduler.config.active_cap == 0
        assert reason_of(driver, request("a")) == "REJECTED_SCRATCH_BUDGET"

    def test_duplicate_of_an_active_and_of_a_queued_one(self, mode):
        driver = Driver(**small(mode))
        driver.submit(request("a"), request("b"))
        assert reason_of(driver, request("a")) == "REJECTED_DUPLICATE"
        assert reason_of(driver, request("b")) == "REJECTED_DUPLICATE"
        driver.run()
        assert driver.finishes == {"a": ["length"], "b": ["length"]}, "the first ones are unaffected"


@pytest.mark.parametrize("mode", MODES)
def test_precedence(mode):
    """Every refusal at once, then one cause less at a time."""
    bad = small(mode, scratch_bytes=100, scratch_bytes_per_session=100, max_queue_depth=0)
    huge = {"prompt_len": 60, "max_tokens": 6}
    driver = Driver(**bad)
    driver.submit(request("a"))
    no_scratch = msgspec.structs.replace(driver.scheduler.config, scratch_bytes=99)
    assert reason_of(driver, request("a", **huge)) == "REJECTED_DUPLICATE"
    assert never_fits(request("b", **huge), no_scratch) is Admission.REJECTED_KV_BUDGET
    assert never_fits(request("b"), no_scratch) is Admission.REJECTED_SCRATCH_BUDGET
    assert reason_of(driver, request("b", **huge)) == "REJECTED_KV_BUDGET", "not QUEUE_FULL: it will never fit"
    assert reason_of(driver, request("b")) == "REJECTED_QUEUE_FULL"


@pytest.mark.parametrize(("mode", "most"), [("single", 4), ("reserve", 5), ("optimistic", 5)])
def test_the_kv_check_counts_the_whole_generation(mode, most):
    """64 positions: DGR counts prompt + new, the others what is stored, which is one less."""
    driver = Driver(**small(mode))
    assert reason_of(driver, request("a", prompt_len=60, max_tokens=most + 1)) == "REJECTED_KV_BUDGET"
    assert reason_of(driver, request("a", prompt_len=60, max_tokens=most)) == "ADMITTED"
    driver.run()
    assert driver.finishes["a"] == ["length"]


def test_the_kv_check_is_about_a_request_alone():
    driver = Driver(**small("single", max_active=4, max_queue_depth=None))
    reasons = driver.submit(*(request(name, prompt_len=40, max_tokens=20) for name in "abcd"))
    assert reasons == [Admission.ADMITTED] * 4, "together they need far more than there is"


@pytest.mark.parametrize(
    ("total", "per_session", "cap"), [(None, 100, 8), (1000, 0, 8), (1000, 100, 8), (399, 100, 3), (99, 100, 0)]
)
def test_scratch_bounds_the_slots(total, per_session, cap):
    config = SchedulerConfig(max_active=8, scratch_bytes=total, scratch_bytes_per_session=per_session)
    assert config.active_cap == cap


def test_no_more_sequences_run_than_scratch_allows():
    driver = Driver(max_active=8, scratch_bytes=300, scratch_bytes_per_session=100)
    driver.submit(*(request(f"r{number}") for number in range(6)))
    driver.run()
    assert max(plan.decode_rows for plan in driver.plans) == 3


def test_a_head_without_kv_makes_the_next_one_wait_although_slots_are_free():
    driver = Driver(max_active=8, kv_tokens=64, block_size=4, kv_admission="reserve", max_queue_depth=2)
    driver.submit(request("a", prompt_len=40, max_tokens=9), request("big", prompt_len=40, max_tokens=9))
    driver.step()
    assert driver.scheduler.waiting_count == 1
    assert reason_of(driver, request("c")) == "QUEUED"
    assert reason_of(driver, request("d")) == "REJECTED_QUEUE_FULL"


def test_what_is_held_back_is_queued():
    driver = Driver(hold_until_queued=2)
    assert [reason_of(driver, request(name)) for name in "ab"] == ["QUEUED", "QUEUED"]


def test_the_strings_are_stable():
    assert {reason.value for reason in Admission} == {
        "ADMITTED",
        "QUEUED",
        "REJECTED_QUEUE_FULL",
        "REJECTED_KV_BUDGET",
        "REJECTED_SCRATCH_BUDGET",
        "REJECTED_DUPLICATE",
    }
    assert [reason.is_accepted for reason in Admission] == [True, True, False, False, False, False]


@pytest.fixture(params=FAMILIES)
def protocol(request):
    return request.param


def refusing(protocol, **scheduler):
    """An engine whose model allows longer texts than its KV budget."""
    config = StubConfig(model=Model(max_model_len=4096), scheduler=SchedulerConfig(**small("single", **scheduler)))
    return EngineDriver(protocol, config)


class TestOnTheWire:
    """A refusal is a terminal row without tokens: a gateway must never wait for a request that isn't there."""

    def test_a_transient_refusal_ends_in_abort(self, protocol):
        driver = refusing(protocol)
        for name in "abc":
            driver.add(name)
        assert finishes_of(driver.run(), "c") == ["abort"]

    @pytest.mark.parametrize(
        ("fields", "prompt_len", "reason"),
        [
            ({}, 100, "REJECTED_KV_BUDGET"),
            ({"scratch_bytes": 1, "scratch_bytes_per_session": 2}, 4, "REJECTED_SCRATCH_BUDGET"),
        ],
    )
    def test_a_permanent_refusal_never_looks_transient(self, protocol, fields, prompt_len, reason, caplog):
        driver = refusing(protocol, **fields)
        with caplog.at_level(logging.INFO, "engine_stub"):
            driver.add("a", prompt_len=prompt_len)
            batches = driver.run()
        # TokenSpeed's wire has one word for all that the engine ended.
        assert finishes_of(batches, "a") == ["error" if protocol == "vllm" else "abort"]
        if protocol == "vllm":
            assert batches[0].raw[1][0][6] == reason
        (record,) = [record for record in caplog.records if record.getMessage() == "request_refused"]
        assert (record.id, record.reason) == ("a", reason)
        assert driver.engine.report()["admissions"][reason] == 1
        assert [(refusal.request_id, refusal.reason) for refusal in driver.records.refusals] == [("a", reason)]
        assert driver.engine.live_ids == frozenset()

    @pytest.mark.parametrize("steps", [0, 1])
    def test_a_duplicate_is_counted_as_a_reason_and_as_the_senders_fault(self, protocol, steps):
        driver = refusing(protocol)
        driver.add("a")
        for _ in range(steps):
            driver.step()
        driver.add("a")
        batches = driver.run()
        assert max(finishes_of(batches, "a")) == "length"
        assert driver.engine.report()["admissions"]["REJECTED_DUPLICATE"] == 1
        assert driver.records.refused == {Admission.REJECTED_DUPLICATE: 1}
        assert driver.records.bad == 1

    def test_a_victim_of_eviction_keeps_what_it_got_and_ends_in_abort(self, protocol, caplog):
        driver = refusing(protocol, max_active=2)
        with caplog.at_level(logging.INFO, "engine_stub"):
            driver.add("old", prompt_len=30, max_tokens=30)
            driver.add("young", prompt_len=20, max_tokens=30)
            batches = driver.run()
        assert finishes_of(batches, "old") == ["length"]
        assert finishes_of(batches, "young") == ["abort"]
        rows = [row for batch in batches for row in batch.rows if row.id == "young"]
        assert [row.tokens for row in rows[:-1]] == [[token] for token in driver.expected(20, len(rows) - 1)]
        assert (rows[-1].tokens, len(rows) > 3) == ([], True)
        if protocol == "vllm":
            last = next(row for batch in batches for row in batch.raw[1] if row[0] == "young" and row[5] is not None)
            assert last[6] == "cache_miss"
        assert driver.engine.report()["cache_misses"] == 1
        assert [record.ids for record in caplog.records if record.getMessage() == "cache_miss"] == [["young"]]
