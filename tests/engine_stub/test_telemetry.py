"""Counters, gauges and rates with the caller's clock; step timing; the event log; the control socket's views."""

import asyncio
import itertools
import json
import logging
import math

import msgspec
import pytest

from engine_stub.backend import BackendInfo, registry
from engine_stub.config import StubConfig, TelemetrySettings, load_config
from engine_stub.control import ControlServer
from engine_stub.control_client import ask
from engine_stub.engine import RankEngine
from engine_stub.faults import Faults
from engine_stub.group import StubGroup, make_codec
from engine_stub.records import Records
from engine_stub.scheduler import Scheduler, SchedulerConfig
from engine_stub.telemetry import Rate, Telemetry
from engine_stub.telemetry_log import PARTS
from tests.engine_stub.test_profiles import profile
from tests.support.paged_model import PagedDriver
from tests.support.raw_gateway import RawGateway
from tests.support.stub_engine import EngineDriver, finishes_of
from tests.support.stub_scheduler import request

INFO = BackendInfo(name="x", numerics="exact", batch_invariant=True, kv_bytes_per_token=1536, weight_bytes=777)


def numbers(value):
    """Every number in a nested report."""
    match value:
        case dict():
            return [number for inner in value.values() for number in numbers(inner)]
        case bool() | None | str():
            return []
        case _:
            return [value]


class Observed(PagedDriver):
    """The driver with telemetry and a clock that the test moves."""

    def __init__(self, config, interval_s=1.0):
        super().__init__(config)
        self.telemetry = Telemetry(self.scheduler, INFO, interval_s=interval_s, now=0.0)
        self.now = 0.0

    def step(self, between=lambda: None):
        plan = super().step(between)
        if plan is not None:
            self.telemetry.observe(plan, self.now)
        return plan

    @property
    def report(self):
        return self.telemetry.snapshot(self.now)


class TestCounters:
    def test_before_the_first_tick_everything_is_finite_and_json(self):
        report = Telemetry(Scheduler(SchedulerConfig()), INFO).snapshot(0.0)
        assert json.loads(msgspec.json.encode(report)) == report
        assert all(math.isfinite(number) for number in numbers(report))
        assert report["batch_occupancy"] == {"last": 0, "avg": 0.0, "max": 0}
        assert (report["ticks"], report["prefill_tokens"]["per_s"], report["decode_tokens"]["per_s"]) == (0, 0.0, 0.0)

    def test_the_dgr_workload(self):
        driver = Observed(profile("dgr012", max_active=4))
        driver.submit(*(request(f"r{number}") for number in range(8)))
        driver.run()
        report = driver.report
        assert (report["ticks"], report["decode_ticks"]) == (19, 18)
        assert report["batch_occupancy"] == {"last": 1, "avg": 56 / 18, "max": 4}
        assert (report["prefill_tokens"]["total"], report["decode_tokens"]["total"]) == (32, 56)
        assert (report["completed"], report["active_sessions"], report["queue_depth"]) == (8, 0, 0)
        assert json.loads(msgspec.json.encode(report)) == report

    def test_occupancy_is_a_mean_over_the_ticks_that_decoded(self):
        driver = Observed(profile("dgr012"))
        driver.submit(request("a", max_tokens=3))
        driver.run()
        assert driver.report["batch_occupancy"]["avg"] == 1.0
        assert driver.report["ticks"] == 3

    def test_kv_figures_are_kept_apart(self):
        driver = Observed(profile("dgr012", block_size=4))
        driver.submit(request("a", max_tokens=4))
        driver.step()
        driver.step()
        kv = driver.report["kv"]
        assert (kv["used_bytes"], kv["reserved_bytes"]) == (5 * 1536, 8 * 1536)
        assert kv["budget_bytes"] == 4096 * 1536
        assert kv["pressure"] == 2 / 1024
        driver.run()
        kv = driver.report["kv"]
        assert (kv["used_bytes"], kv["reserved_bytes"], kv["pressure"]) == (0, 0, 0.0)
        assert (kv["used_peak_bytes"], kv["reserved_peak_bytes"]) == (6 * 1536, 8 * 1536)
        assert (kv["high_water_bytes"], kv["reserved_high_water_bytes"]) == (7 * 1536, 8 * 1536)

    def test_refusals_by_reason(self):
        driver = Observed(profile("dgr012", max_active=1, max_queue_depth=0, kv_tokens=64))
        driver.submit(request("a"), request("a"), request("b"), request("c", prompt_len=99))
        report = driver.report
        assert report["rejected"] == 3
        assert report["admissions"] == {
            "ADMITTED": 1,
            "QUEUED": 0,
            "REJECTED_QUEUE_FULL": 1,
            "REJECTED_KV_BUDGET": 1,
            "REJECTED_SCRATCH_BUDGET": 0,
            "REJECTED_DUPLICATE": 1,
        }

    def test_scratch_and_weights(self):
        config = profile("dgr012", scratch_bytes=1000, scratch_bytes_per_session=250, weight_budget_bytes=900)
        driver = Observed(config)
        driver.submit(*(request(name) for name in "ab"))
        assert driver.report["scratch"] == {"used_bytes": 500, "budget_bytes": 1000, "pressure": 0.5}
        assert driver.report["weights"] == {"bytes": 777, "budget_bytes": 900}
        unbounded = Observed(profile("dgr012")).report
        assert unbounded["scratch"] == {"used_bytes": 0, "budget_bytes": None, "pressure": None}
        assert unbounded["weights"]["budget_bytes"] is None

    def test_how_sequences_end(self):
        driver = Observed(profile("dgr012", max_active=2, kv_tokens=40))
        driver.submit(*(request(name, prompt_len=8, max_tokens=24) for name in ("old", "victim")))
        driver.run()
        driver.submit(request("gone"))
        driver.scheduler.abort("gone")
        driver.submit(request("failed"))
        driver.scheduler.fail(driver.scheduler.plan())
        report = driver.report
        names = ("completed", "cache_misses", "aborted", "failed")
        assert [report[name] for name in names] == [1, 1, 1, 1]

    def test_the_prefix_cache(self):
        driver = Observed(SchedulerConfig(block_size=4, kv_tokens=400))
        for name in "ab":
            driver.submit(request(name, prompt_len=10, max_tokens=1))
            driver.run()
        cache = driver.report["prefix_cache"]
        assert cache == {
            "blocks": 2,
            "requests": 2,
            "queried_tokens": 20,
            "hit_tokens": 8,
            "hit_ratio": 0.4,
            "evictions": 0,
        }
        assert driver.report["kv"]["cached_bytes"] == 8 * 1536
        assert Observed(profile("dgr012")).report["prefix_cache"] is None


class TestRates:
    def test_a_rate_is_a_mean_over_the_latest_full_interval(self):
        rate = Rate(2.0, 10.0)
        assert [rate.at(10.0, 0), rate.at(11.9, 50)] == [0.0, 0.0], "before the first interval"
        assert rate.at(12.0, 60) == 30.0
        assert rate.at(13.0, 1000) == 30.0
        assert rate.at(16.0, 100) == 10.0
        assert rate.at(18.0, 100) == 0.0, "an idle rank comes to rest"

    def test_tokens_per_second_follow_the_injected_clock(self):
        driver = Observed(profile("dgr012"))
        driver.submit(request("a", prompt_len=12, max_tokens=9))
        for driver.now in (0.1, 0.2, 0.3, 0.4, 1.0):
            driver.step()
        report = driver.report
        assert (report["prefill_tokens"]["per_s"], report["decode_tokens"]["per_s"]) == (12.0, 4.0)


def engine(config, clock):
    return RankEngine(
        make_codec("vllm", config), registry.create("synthetic", config), config, 0, Records(9), Faults(), clock
    )


class TestStepTiming:
    def test_the_parts_of_a_step(self):
        """A clock that moves by one second at each look: every part lasts one."""
        config = StubConfig(telemetry=TelemetrySettings(step_timing=True))
        driver = EngineDriver("vllm", config)
        seconds = itertools.count()
        driver.engine = engine(config, lambda: next(seconds))
        driver.add("a", max_tokens=4)
        driver.run()
        timing = driver.engine.report()["step_timing"]
        assert timing["steps"] == 4
        assert all(timing[part] == {"last_s": 1, "avg_s": 1, "max_s": 1} for part in PARTS)

    def test_it_is_off_by_default_and_then_null(self):
        driver = EngineDriver("vllm")
        driver.add("a")
        driver.run()
        assert driver.engine.timer is None
        assert driver.engine.report()["step_timing"] is None


class TestEventLog:
    @staticmethod
    def driver(**scheduler):
        config = StubConfig(
            scheduler=SchedulerConfig(block_size=4, **scheduler), telemetry=TelemetrySettings(event_log=True)
        )
        return EngineDriver("tokenspeed", config)

    @staticmethod
    def story(driver, request_id):
        return [event["event"] for event in driver.engine.log.of(request_id)]

    def test_the_story_of_a_request(self):
        driver = self.driver()
        driver.add("a", max_tokens=3)
        driver.run()
        assert self.story(driver, "a") == ["activated", "prefill_begin", "prefill_end", "first_token", "finished"]
        first, begin, *_, last = driver.engine.log.of("a")
        assert (first["slot"], first["cached_tokens"], first["is_resumed"]) == (0, 0, False)
        assert begin["chunks"] == [{"start": 0, "count": 4, "is_last": True, "slot": 0}]
        assert (last["reason"], last["generated"]) == ("length", 3)

    def test_a_prefill_shows_its_whole_batch(self):
        driver = self.driver(prefix_cache=False)
        driver.add("running", max_tokens=9)
        driver.step()
        driver.add("a")
        driver.add("b", prompt_len=6)
        driver.step()
        begin = driver.engine.log.of("b")[1]
        assert (begin["ids"], begin["decode_rows"]) == (["a", "b"], 1)
        assert [chunk["count"] for chunk in begin["chunks"]] == [4, 6]

    def test_chunks_preemption_and_return(self):
        driver = self.driver(kv_tokens=64, prefix_cache=False)
        for number in range(3):
            driver.add(f"r{number}", prompt_len=12, max_tokens=30)
        driver.run()
        story = self.story(driver, "r2")
        assert "preempted" in story
        assert story.count("first_token") == story.count("finished") == 1
        again = [event for event in driver.engine.log.of("r2") if event["event"] == "activated"]
        assert [event["is_resumed"] for event in again][:2] == [False, True]

    def test_refused_aborted_and_failed_requests(self):
        driver = self.driver(max_active=1, max_queue_depth=0)
        driver.add("a", max_tokens=9)
        driver.add("refused")
        driver.step()
        driver.abort("a")
        driver.run()
        assert self.story(driver, "refused") == ["refused"]
        assert driver.engine.log.of("refused")[0]["reason"] == "REJECTED_QUEUE_FULL"
        assert driver.engine.log.of("a")[-1]["reason"] == "abort"
        driver.engine.backend.forward = lambda _plan: 1 / 0
        driver.add("failed")
        driver.run()
        assert driver.engine.log.of("failed")[-1]["reason"] == "error"

    def test_it_is_bounded_and_json(self):
        config = StubConfig(telemetry=TelemetrySettings(event_log=True, event_limit=5))
        driver = EngineDriver("vllm", config)
        for number in range(4):
            driver.add(f"r{number}")
        driver.run()
        events = list(driver.engine.log.events)
        assert len(events) == 5
        assert json.loads(msgspec.json.encode(events)) == events

    def test_every_event_is_a_log_line(self, caplog):
        with caplog.at_level(logging.INFO, "engine_stub"):
            driver = self.driver()
            driver.add("a")
            driver.run()
        lines = [record for record in caplog.records if record.getMessage() == "engine_event"]
        assert [line.kind for line in lines][:2] == ["activated", "prefill_begin"]
        assert lines[0].facts["id"] == "a"

    def test_it_is_off_by_default(self):
        assert EngineDriver("vllm").engine.log is None


@pytest.fixture
async def served():
    settings = {
        "time_scale": 0.0,
        "telemetry.event_log": True,
        "telemetry.step_timing": True,
        "scheduler.kv_tokens": 64,
    }
    config = load_config("dgr012", None, settings, {})
    async with (
        RawGateway("vllm") as gateway,
        StubGroup("vllm", gateway.address, ranks=2, config=config) as group,
        ControlServer(group, "tcp://127.0.0.1:*") as server,
    ):
        await group.ready()
        await gateway.registered(2)
        await gateway.add(1, "a", [1, 2, 3], 5)
        await gateway.collect(1, "a")
        task = asyncio.create_task(server.run())
        yield gateway, group, server
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def asked(server, **fields):
    reply = await asyncio.to_thread(ask, server.address, fields, 10)
    assert reply["ok"], reply
    return reply["ranks"]


class TestControl:
    async def test_telemetry(self, served):
        _, _, server = served
        idle, used = await asked(server, op="telemetry")
        assert (idle["rank"], idle["ticks"], used["completed"]) == (0, 0, 1)
        assert used["step_timing"]["steps"] == used["ticks"] == 5
        assert used["decode_tokens"]["total"] == 4
        assert (await asked(server, op="telemetry", rank=1))[0]["rank"] == 1

    async def test_a_refusal_and_its_reason(self, served):
        gateway, _, server = served
        await gateway.add(1, "huge", [1] * 60, 5)
        batches = await gateway.collect(1, "huge")
        assert finishes_of(batches, "huge") == ["error"]
        (used,) = await asked(server, op="state", rank=1)
        assert used["refusals"] == {
            "count": {"REJECTED_KV_BUDGET": 1},
            "latest": [{"request_id": "huge", "reason": "REJECTED_KV_BUDGET"}],
        }
        (telemetry,) = await asked(server, op="telemetry", rank=1)
        assert telemetry["admissions"]["REJECTED_KV_BUDGET"] == telemetry["rejected"] == 1

    async def test_effective_config(self, served):
        _, group, server = served
        serving, other = await asked(server, op="effective-config")
        assert (serving["backend"], serving["kv"]["bytes_per_token"]) == ("synthetic", 1536)
        assert (other["in_flight_now"], other["in_flight_peak"]) == (0, 1)
        assert serving["token_budget"] is None
        await group.ranks[0].kill()
        dead, _ = await asked(server, op="effective-config")
        assert (dead["in_flight_now"], dead["in_flight_peak"]) == (None, None)
        assert dead.keys() == serving.keys()

    async def test_events(self, served):
        gateway, _, server = served
        await gateway.add(1, "b", [1, 2, 3], 1)
        await gateway.collect(1, "b")
        _, used = await asked(server, op="events", id="a")
        assert [event["event"] for event in used["events"]][-1] == "finished"
        idle, everything = await asked(server, op="events")
        assert idle["events"] == []
        assert {event["id"] for event in everything["events"] if "id" in event} == {"a", "b"}
        assert all(event.get("id", "a") == "a" and event.get("ids", ["a"]) == ["a"] for event in used["events"])
