"""The predictor: whole, finite, non-negative microseconds whatever a formula gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.scheduling import Predictor as Settings
from gateway.core.formula import FormulaError
from gateway.core.predictor import MAX_US, Predictor, compile_prefill, compile_step
from gateway.core.predictor_formula import PREFILL_VARIABLES, STEP_VARIABLES
from tests.support.formulas import print_tree


def predictor(prefill_ms="1", **more):
    return Predictor(Settings(prefill_ms=prefill_ms, **more))


# ---- results ------------------------------------------------------------------------------------


def test_a_request_takes_what_the_formula_says():
    model = predictor("2 + 0.03 * sum(new_tokens) + 0.001 * sum(cached_tokens)")
    assert model.prefill_us(1000) == 32_000
    assert model.prefill_us(1000, 400) == 2_000 + 18_000 + 400
    assert model.has_model
    assert model.scale == 1.0
    assert model.faults == 0


def test_a_batch_is_not_the_sum_of_its_members():
    model = predictor("5 + 0.01 * total_new_tokens + 0.1 * max_prompt_tokens / batch_size")
    assert model.batch_us([(100, 0), (300, 100)]) == 5_000 + 3_000 + 15_000
    assert model.batch_us([(100, 0)]) == model.prefill_us(100) == 5_000 + 1_000 + 10_000
    assert model.batch_us([]) == 0


def test_cheap_requests_do_not_become_nothing():
    model = predictor("0.0125 * sum(new_tokens)")
    assert [model.prefill_us(count) for count in (1, 2, 3)] == [13, 25, 38]
    assert predictor("0.0004").prefill_us(1) == 0
    assert predictor("0.0005").prefill_us(1) == 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((10, 0), 10_010), ((10, 10), 1_010), ((10, 11), 1_010), ((10, -3), 10_010), ((-4, 2), 1_000), ((0, 0), 1_000)],
)
def test_impossible_sizes_count_as_the_nearest_possible(sizes, expected):
    """And at least one token has to be computed."""
    model = predictor("sum(new_tokens) + 0.001 * sum(prompt_tokens)")
    assert model.prefill_us(*sizes) == expected
    assert model.batch_us([sizes, (5, 0)]) == expected + 5_005


def test_a_whole_cached_prompt_has_a_cached_prefix():
    model = predictor("10 - 4 * sum(has_cached)")
    assert [model.prefill_us(5, cached) for cached in (0, 1, 5)] == [10_000, 6_000, 6_000]
    assert model.batch_us([(5, 5), (5, 0)]) == 6_000


# ---- without a model ----------------------------------------------------------------------------


def test_without_settings_predictions_only_order_by_new_tokens():
    model = Predictor()
    assert not model.has_model
    assert not model.has_step_model
    assert model.prefill_us(1) == 30
    assert model.prefill_us(131_072, 31_072) == 3_000_000
    assert model.batch_us([(100, 0), (50, 20)]) == 3_900
    assert model.step_us(5, 100) is None
    for _ in range(100):
        model.observe(1000, 5000)
        model.observe_prefill(1000, 0, 5000)
    assert model.scale == 1.0
    assert model.prefill_us(1) == 30
    assert model.faults == 0


@given(st.integers(1, 50_000_000))
def test_without_settings_predictions_are_exact(tokens):
    assert Predictor().prefill_us(tokens) == 30 * tokens


# ---- results that are no time -------------------------------------------------------------------

_PRIOR_US = 300  # ten new tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-5", 0),
        ("-1e-9", 0),
        ("-pow(10, 400)", 0),
        ("-1e308 * 1e308", 0),
        ("exp(1e6)", MAX_US),
        ("1e308 * 1e308", MAX_US),
        ("3600000.001", MAX_US),
        ("*".join(["9007199254740992"] * 20), MAX_US),
        ("1 / 0", _PRIOR_US),
        ("1 / sum(has_cached * 0)", _PRIOR_US),
        ("log(0)", _PRIOR_US),
        ("sqrt(-1)", _PRIOR_US),
        ("pow(0, -1)", _PRIOR_US),
        ("exp(1e6) - exp(1e6)", _PRIOR_US),
        ("0 * exp(1e6)", _PRIOR_US),
        ("max(0, exp(1e6) - exp(1e6))", _PRIOR_US),
        ("max(sum(exp(1e6)) - sum(exp(1e6)), 0)", _PRIOR_US),
        ("*".join(["9007199254740992"] * 20) + " * 0.5", _PRIOR_US),
    ],
)
def test_results_that_are_no_time_are_replaced_and_counted(text, expected):
    model = predictor(text)
    assert model.prefill_us(12, 2) == expected
    assert model.faults == 1
    assert model.batch_us([(4, 1), (7, 0)]) == expected
    assert model.faults == 2


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("-0.0", 0), ("3600000", MAX_US), ("1 > 2", 0)])
def test_the_ends_of_the_range_are_no_faults(text, expected):
    model = predictor(text)
    assert model.prefill_us(10) == expected
    assert model.batch_us([(10, 0)] * 2) == expected
    assert model.faults == 0


# ---- decode steps -------------------------------------------------------------------------------


def test_a_step_takes_what_its_formula_says():
    model = predictor(step_ms="5.5 + 0.02 * in_flight_decode + 1e-5 * ctx_tokens")
    assert model.has_step_model
    assert model.step_us(10, 20_000) == 5_900
    assert model.step_us(0, 0) == 5_500


def test_without_a_step_formula_nothing_is_known_of_steps():
    model = predictor()
    assert not model.has_step_model
    assert model.step_us(10, 20_000) is None
    assert model.faults == 0


@pytest.mark.parametrize("text", ["-1", "1 / in_flight_decode", "log(ctx_tokens)", "exp(1e6)", "0 * exp(1e6)", "3.7e6"])
def test_a_step_that_is_no_time_is_not_known(text):
    model = predictor(step_ms=text)
    assert model.step_us(0, 0) is None
    assert model.faults == 1


def test_a_step_of_nothing_is_a_time():
    model = predictor(step_ms="0.1 * in_flight_decode")
    assert model.step_us(0, 5) == 0
    assert model.faults == 0


# ---- settings -----------------------------------------------------------------------------------


def test_formulas_with_a_fault_are_refused():
    with pytest.raises(FormulaError) as caught:
        predictor("2 + new_tokens")
    assert caught.value.column == 5
    with pytest.raises(FormulaError, match="column 1: unknown variable 'running'"):
        predictor("1", step_ms="running")


# ---- for any formula ----------------------------------------------------------------------------

_numbers = st.one_of(st.integers(0, 50), st.sampled_from([0.5, 2.5, 1e6, 1e-3, 1e308]))
_VALUES = [*(f"total_{name}_tokens" for name in ("prompt", "cached", "new")), "batch_size", "max_new_tokens"]
_SUMS = [("sum", name) for name in ("prompt_tokens", "cached_tokens", "new_tokens", "has_cached")]


def _grow(children):
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "/", "min", "max", "pow", "<", "==", "and"]), children, children),
        st.tuples(st.sampled_from(["neg", "sqrt", "log", "exp"]), children),
        st.tuples(st.just("^"), children, st.sampled_from([0, 2, 0.5, -1])),
        st.tuples(st.just("if"), children, children, children),
    )


def any_formula(*leaves):
    tree = st.recursive(st.one_of(_numbers, st.sampled_from(leaves)), _grow, max_leaves=8)
    return tree.map(print_tree).filter(lambda text: len(text) <= 512)


_sizes = st.one_of(st.integers(-10, 300_000), st.sampled_from([0, 1, 2**31, 2**63, 10**30]))
_members = st.lists(st.tuples(_sizes, _sizes), max_size=4)


def is_a_time(microseconds):
    return type(microseconds) is int and 0 <= microseconds <= MAX_US


@settings(max_examples=300, deadline=None)
@given(text=any_formula(*_VALUES, *_SUMS), members=_members, factor=st.integers(0, 10**9))
def test_a_prediction_is_a_time_whatever_the_formula_and_the_sizes(text, members, factor):
    model = predictor(text, calibrate=True)
    for _ in range(2):
        for size in members:
            assert is_a_time(model.prefill_us(*size))
            assert model.batch_us([size]) == model.prefill_us(*size)
        assert is_a_time(model.batch_us(members))
        for _ in range(34):
            model.observe_prefill(100, 0, factor)
        assert 0.1 <= model.scale <= 10


@settings(max_examples=200, deadline=None)
@given(text=any_formula(*STEP_VARIABLES), decoding=_sizes, tokens=_sizes)
def test_a_step_is_a_time_or_not_known_whatever_the_formula(text, decoding, tokens):
    model = predictor(step_ms=text)
    microseconds = model.step_us(decoding, tokens)
    assert is_a_time(microseconds) if microseconds is not None else model.faults == 1


_positive = st.one_of(st.integers(1, 50), st.sampled_from([1.5, 2.5, 1e6, 1e308]))
_RISING_LEAVES = st.one_of(_positive, st.sampled_from([("sum", "new_tokens"), "total_prompt_tokens", "max_new_tokens"]))
_knees = st.builds(
    lambda slope, knee: ("*", slope, ("sum", ("max", ("-", "new_tokens", knee), 0))), _positive, st.integers(1, 5000)
)


def _rise(children):
    return st.one_of(
        st.tuples(st.sampled_from(["+", "*", "min", "max"]), children, children),
        st.tuples(st.sampled_from(["sqrt", "exp"]), children),
        st.tuples(st.just("^"), children, st.sampled_from([1, 2, 3, 0.5])),
        st.tuples(st.just("+"), children, _knees),
    )


@settings(max_examples=300, deadline=None)
@given(
    tree=st.recursive(_RISING_LEAVES, _rise, max_leaves=5),
    less=st.sampled_from([0, 2, 1e5, 1e308]),
    shorter=st.integers(1, 200_000),
    more=st.integers(0, 200_000),
)
def test_a_longer_prompt_does_not_take_less_where_the_formula_rises(tree, less, shorter, more):
    """Also where it falls below 0 or gets too large to compute."""
    model = predictor(print_tree(("-", tree, less)))
    assert model.prefill_us(shorter) <= model.prefill_us(shorter + more)
    assert model.batch_us([(7, 0), (shorter, 0)]) <= model.batch_us([(7, 0), (shorter + more, 0)])


def test_the_compiled_formulas_are_offered_for_checks():
    assert compile_prefill("1").text == compile_step("1").text == "1"
    assert set(PREFILL_VARIABLES).isdisjoint(STEP_VARIABLES)
