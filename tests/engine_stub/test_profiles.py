"""The profiles as configurations of one machine, and what holds for every one of them."""

import msgspec
import pytest

from engine_stub.config import FORCE_BATCHED, PROFILES, ConfigError, load_config
from engine_stub.scheduler import Admission, SchedulerConfig
from tests.support.paged_model import PagedDriver, expected
from tests.support.stub_scheduler import request

BURST = 100


def profile(name, **changes):
    return msgspec.structs.replace(load_config(name, None, {}, {}).scheduler, **changes)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_serves_ragged_requests_with_the_right_tokens(name):
    driver = PagedDriver(profile(name))
    requests = [request(f"r{number}", prompt_len=3 + 5 * number, max_tokens=1 + number) for number in range(8)]
    assert all(admission.is_accepted for admission in driver.submit(*requests))
    driver.run()
    for req in requests:
        assert driver.tokens[req.id] == expected(req)
        assert driver.finishes[req.id] == ["length"]
    assert driver.scheduler.pool.used == driver.scheduler.kv.used_tokens == 0


@pytest.mark.parametrize("name", PROFILES)
def test_a_burst_of_prompts_never_delays_a_running_decode(name):
    """A burst of 100 prompts while one request decodes: a token in every tick, whatever the profile."""
    driver = PagedDriver(profile(name, max_queue_depth=None, kv_tokens=100_000))
    driver.submit(request("running", max_tokens=300))
    driver.step()
    driver.submit(*(request(f"burst-{number}", prompt_len=40, max_tokens=2) for number in range(BURST)))
    driver.run()
    gaps = driver.gaps("running")
    assert len(gaps) == 299
    assert set(gaps) == {1}
    assert sum(len(driver.finishes[f"burst-{number}"]) for number in range(BURST)) == BURST


@pytest.mark.parametrize("name", PROFILES)
def test_one_forward_serves_a_whole_tick(name):
    driver = PagedDriver(profile(name))
    driver.submit(*(request(f"r{number}", prompt_len=6, max_tokens=9) for number in range(6)))
    driver.run()
    assert driver.backend.forwards == driver.scheduler.steps == len(driver.plans)
    assert max(plan.decode_rows for plan in driver.plans) > 3


def test_dgr012_takes_slots_at_once_and_prefills_one_prompt_per_tick():
    driver = PagedDriver(profile("dgr012", max_active=4))
    assert driver.submit(*(request(name) for name in "abcde")) == [Admission.ADMITTED] * 4 + [Admission.QUEUED]
    assert (driver.scheduler.active_count, driver.scheduler.waiting_count) == (4, 1)
    assert driver.scheduler.pool.used == 0, "blocks are taken when a prompt runs"
    driver.run()
    assert all(len(plan.prefills) <= 1 for plan in driver.plans)
    assert [driver.row_steps[name][0] for name in "abcde"] == [1, 2, 3, 4, 9]


def test_sarathi_fills_every_tick_up_to_its_budget():
    driver = PagedDriver(profile("sarathi", token_budget=64, prefill_chunk_size=32))
    driver.submit(*(request(name, prompt_len=150, max_tokens=20) for name in "abc"))
    driver.run()
    assert all(plan.prefill_tokens + len(plan.decodes) <= 64 for plan in driver.plans)
    assert all(chunk.count <= 32 for plan in driver.plans for chunk in plan.prefills)
    assert [plan.prefill_tokens for plan in driver.plans[:4]] == [64, 64, 64, 64]


@pytest.mark.parametrize("zero", ["token_budget", "prefill_chunk_size"])
def test_zero_means_unlimited_and_is_reported_as_null(zero):
    assert getattr(SchedulerConfig(**{zero: 0}), zero) is None
    assert SchedulerConfig(**{zero: 0}) == SchedulerConfig(**{zero: None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whole_prompts": True}, "whole_prompts contradicts token_budget"),
        ({"whole_prompts": True, "token_budget": 0, "prefill_chunk_size": 8}, "whole_prompts contradicts"),
        ({"prefill_before_decode": True, "max_batch_size": 8}, "max_batch_size of at least max_active"),
        ({"recycle_batch": True}, "recycle_batch needs max_prefills_per_tick"),
        ({"kv_tokens": 8}, "less than one block"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        load_config("default", None, {f"scheduler.{name}": value for name, value in settings.items()}, {})


@pytest.mark.parametrize(
    ("value", "is_forced"), [("1", True), ("true", False), ("01", False), ("", False), ("0", False)]
)
def test_the_force_knob_arms_on_exactly_one(value, is_forced):
    assert load_config("default", None, {}, {FORCE_BATCHED: value}).scheduler.force_batched is is_forced
    assert load_config("default", None, {}, {}).scheduler.force_batched is False


def test_the_context_is_not_capped_by_the_pool_where_each_request_is_checked_alone():
    config = load_config("dgr012", None, {"scheduler.kv_tokens": 64}, {})
    assert config.max_model_len == config.model.max_model_len == 4096


class TestWholePrompts:
    """DGR's cap on prompt tokens: whole prompts while they fit, and always the first."""

    @pytest.mark.parametrize(
        ("cap", "lengths"), [(1, [[9], [3], [3]]), (8, [[9], [3, 3]]), (12, [[9, 3], [3]]), (None, [[9, 3, 3]])]
    )
    def test_prompts_per_tick(self, cap, lengths):
        driver = PagedDriver(profile("dgr012", max_prefills_per_tick=None, max_prefill_tokens_per_tick=cap))
        driver.submit(*(request(name, prompt_len=size) for name, size in (("a", 9), ("b", 3), ("c", 3))))
        plans = [driver.step() for _ in lengths]
        assert [[chunk.count for chunk in plan.prefills] for plan in plans] == lengths

    def test_a_prompt_that_must_wait_for_the_next_tick_holds_no_blocks_yet(self):
        driver = PagedDriver(profile("dgr012", max_prefills_per_tick=None, max_prefill_tokens_per_tick=4))
        driver.submit(request("a"), request("b"))
        driver.step()
        assert driver.scheduler.pool.used == 4
