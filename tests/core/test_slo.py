"""TTFT objectives: buckets by prompt length, factors by priority, and deadlines for the order edf."""

import pytest

from gateway.config.scheduling import Slo, SloBucket, SloPriority
from gateway.core.slo import MAX_OBJECTIVE_US, SloTargets


def targets(*buckets, priorities=(), **more):
    return SloTargets(
        Slo(
            ttft=tuple(SloBucket(max_prompt_tokens=limit, ttft_ms=ttft_ms) for limit, ttft_ms in buckets),
            priorities=tuple(SloPriority(priority=priority, factor=factor) for priority, factor in priorities),
            **more,
        )
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"),
    [
        (1, 150_000),
        (255, 150_000),
        (256, 150_000),
        (257, 300_500),
        (1024, 300_500),
        (1025, 2_400_000),
        (9**9, 2_400_000),
    ],
)
def test_the_first_bucket_that_is_long_enough_counts(prompt_tokens, expected):
    slo = targets((256, 150), (1024, 300.5), (None, 2400))
    assert slo.objective_us(prompt_tokens, 0) == expected


def test_a_prompt_beyond_all_buckets_has_no_objective():
    slo = targets((256, 150), (1024, 300))
    assert slo.objective_us(1024, 0) == 300_000
    assert slo.objective_us(1025, 0) is None


def test_without_buckets_there_are_no_objectives():
    slo = SloTargets(Slo())
    assert slo.objective_us(1, 0) is None
    assert slo.mode == "off"
    assert slo.margin_us == 0


def test_one_bucket_for_all_lengths():
    assert targets((None, 80)).objective_us(10**6, 3) == 80_000


def test_a_priority_has_its_factor_and_others_have_none():
    slo = targets((256, 150), (None, 1000), priorities=[(30, 2.0), (70, 0.5), (-1, 1.5)])
    assert [slo.objective_us(100, priority) for priority in (30, 70, -1, 50, 0)] == [
        300_000,
        75_000,
        225_000,
        150_000,
        150_000,
    ]
    assert slo.objective_us(5000, 70) == 500_000


def test_settings_are_in_microseconds():
    slo = targets((None, 10), mode="shadow", margin_ms=12.5)
    assert slo.mode == "shadow"
    assert slo.margin_us == 12_500


def test_objectives_are_whole_positive_and_bounded():
    assert targets((None, 1e-9)).objective_us(1, 0) == 1
    assert targets((None, 1.0004)).objective_us(1, 0) == 1_000
    huge = targets((None, 1e308), priorities=[(1, 1e308)], margin_ms=1e308)
    assert huge.objective_us(1, 1) == huge.objective_us(1, 0) == huge.margin_us == MAX_OBJECTIVE_US


def test_a_deadline_is_the_objective_where_there_is_one():
    slo = targets((256, 150), priorities=[(7, 0.5)])
    assert slo.edf_deadline_us(256, 0, prefill_us=10**9) == 150_000
    assert slo.edf_deadline_us(256, 7, prefill_us=10**9) == 75_000


@pytest.mark.parametrize(
    ("prefill_us", "expected"), [(0, 200_000), (40_000, 200_000), (40_001, 200_005), (1_000_000, 5_000_000)]
)
def test_a_deadline_without_an_objective_grows_with_the_prefill(prefill_us, expected):
    slo = targets((256, 150), priorities=[(7, 0.5)])
    assert slo.edf_deadline_us(257, 7, prefill_us) == expected
