"""Prediction formulas: which name may stand where, and what they compute."""

import math

import pytest

from gateway.core.formula import FormulaError
from gateway.core.formula_syntax import MAX_CHARS, MAX_NODES
from gateway.core.predictor_formula import PREFILL_VARIABLES, STEP_VARIABLES, compile_prefill, compile_step
from gateway.core.variables import FUNCTIONS, VARIABLES

KNEES = """
    213.06 + 4.2e-4 * sum(max(new_tokens - 2048, 0)) + 8.17e-3 * sum(max(new_tokens - 24576, 0))
    - 3.73e-4 * sum(cached_tokens) - 10.61 * sum(cached_tokens > 0) + 2.85e-8 * sum(new_tokens * cached_tokens)
"""
"""A published fit for a large mixture-of-experts model: an overhead, two knees, and what a cached prefix saves."""


def member(prompt_tokens, cached_tokens=0):
    return (prompt_tokens, cached_tokens, max(1, prompt_tokens - cached_tokens), int(cached_tokens > 0))


def single(text, *sizes):
    return compile_prefill(text).single(*member(*sizes))


def batch(text, *sizes):
    return compile_prefill(text).batch([member(*item) for item in sizes])


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ("sum(new_tokens) * 0.03 + 2", [(1000,)], 32),
        ("sum(new_tokens) * 0.03 + 2", [(1000,), (500, 100)], 44),
        ("sum(new_tokens) + 0.3 * sum(cached_tokens)", [(100, 60), (10, 0)], 68),
        ("5 + 0.01 * total_new_tokens + batch_size", [(100,), (200,)], 10),
        ("batch_size * max_prompt_tokens / 100", [(100,), (300,), (200,)], 9),
        ("sum(new_tokens ^ 2) / 1e6", [(1000,), (2000,)], 5),
        ("sum(1)", [(7,), (8,), (9,)], 3),
        ("sum(3 if has_cached else 10)", [(7, 7), (8,), (9, 1)], 16),
        ("sum(max(new_tokens - 50, 0)) + max(total_new_tokens - 250, 0)", [(100,), (200,)], 250),
        ("sqrt(sum(new_tokens)) + sum(sqrt(new_tokens))", [(9,), (16,)], 12),
        ("sum(new_tokens) if batch_size > 1 else 0", [(9,), (16,)], 25),
        ("sum(new_tokens) if batch_size > 1 else 0", [(9,)], 0),
        (KNEES, [(1000,)], 213.06),
        (KNEES, [(3000,)], 213.06 + 4.2e-4 * 952),
        (KNEES, [(32768,)], 213.06 + 4.2e-4 * 30720 + 8.17e-3 * 8192),
        (
            KNEES,
            [(32768, 4096), (10000, 5000), (100,)],
            213.06
            + 4.2e-4 * ((28672 - 2048) + (5000 - 2048))
            + 8.17e-3 * (28672 - 24576)
            - 3.73e-4 * (4096 + 5000)
            - 10.61 * 2
            + 2.85e-8 * (28672 * 4096 + 5000 * 5000),
        ),
    ],
)
def test_value(text, sizes, expected):
    assert batch(text, *sizes) == pytest.approx(expected, rel=1e-12)
    if len(sizes) == 1:
        assert single(text, *sizes[0]) == pytest.approx(expected, rel=1e-12)


def test_all_variables_of_a_batch():
    sizes = [(100, 40), (30, 30), (250,)]
    expected = {
        "sum(prompt_tokens)": 380,
        "sum(cached_tokens)": 70,
        "sum(new_tokens)": 311,
        "sum(has_cached)": 2,
        "batch_size": 3,
        "total_prompt_tokens": 380,
        "total_cached_tokens": 70,
        "total_new_tokens": 311,
        "max_prompt_tokens": 250,
        "max_new_tokens": 250,
    }
    assert {name.removeprefix("sum(").rstrip(")") for name in expected} == set(PREFILL_VARIABLES)
    for text, value in expected.items():
        assert batch(text, *sizes) == value, text


def test_all_variables_of_a_single_request():
    expected = {"batch_size": 1, "max_prompt_tokens": 100, "max_new_tokens": 60}
    expected |= {"total_prompt_tokens": 100, "total_cached_tokens": 40, "total_new_tokens": 60}
    expected |= {"sum(prompt_tokens)": 100, "sum(cached_tokens)": 40, "sum(new_tokens)": 60, "sum(has_cached)": 1}
    for text, value in expected.items():
        assert single(text, 100, 40) == value, text


def test_step_formula():
    step = compile_step("6 + 0.05 * in_flight_decode + 2e-5 * max(ctx_tokens - 1000, 0)").step
    assert step(8, 51_000) == pytest.approx(7.4)
    assert step(0, 0) == 6


# ---- what is refused, and where -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("new_tokens", 1, "new_tokens is of one request: wrap it in sum(...) or use total_new_tokens"),
        ("2 + 0.03 * prompt_tokens", 12, "wrap it in sum(...) or use total_prompt_tokens"),
        ("5 * has_cached", 5, "has_cached is of one request: wrap it in sum(...)"),
        ("sum(new_tokens) + cached_tokens", 19, "or use total_cached_tokens"),
        ("max(sum(new_tokens), new_tokens)", 22, "wrap it in sum(...)"),
        ("1 if new_tokens > 5 else 2", 6, "wrap it in sum(...)"),
        ("sum(new_tokens * batch_size)", 18, "batch_size is of the whole batch and can't be inside sum(...)"),
        ("sum(max(new_tokens,\n max_new_tokens))", 22, "max_new_tokens is of the whole batch"),
        ("sum(total_new_tokens)", 5, "is of the whole batch"),
        ("sum(new_tokens + sum(cached_tokens))", 18, "sum can't be inside another sum"),
        ("sum()", 1, "sum takes 1 argument(s), not 0"),
        ("1 + sum(new_tokens, 2)", 5, "sum takes 1 argument(s), not 2"),
        ("sum", 1, "sum is a function: write sum(...)"),
        ("sum(new_tokns)", 5, "unknown variable 'new_tokns'; did you mean 'new_tokens'?"),
        ("total_new_token * 2", 1, "did you mean 'total_new_tokens'?"),
        ("inputTokens * 2", 1, "unknown variable 'inputTokens'"),
        ("in_flight_decode", 1, "unknown variable 'in_flight_decode'"),
        ("queued_tokens", 1, "unknown variable"),
        ("fleet_min(1)", 1, "unknown function 'fleet_min'"),
        ("smu(new_tokens)", 1, "unknown function 'smu'; did you mean 'sum'?"),
        ("batch_size(2)", 1, "batch_size is a variable and can't be called"),
        ("sum(new_tokens) ** 2", 17, "write ^ for powers"),
        ("-sum(new_tokens)^2", 1, "needs parentheses"),
        ("sum(new_tokens)^batch_size", 17, "the exponent of ^"),
        ("sum(new_tokens", 4, "syntax error"),
        ("", 1, "empty"),
        ("1 " * 257, MAX_CHARS + 1, f"at most {MAX_CHARS}"),
        ("+".join(["batch_size"] * 34), None, f"more than {MAX_NODES} parts"),
    ],
)
def test_error_column(text, column, message):
    with pytest.raises(FormulaError) as caught:
        compile_prefill(text)
    assert message in caught.value.message
    if column is not None:
        assert caught.value.column == column


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("5 + new_tokens", 5, "unknown variable 'new_tokens'"),
        ("5 + in_flight_decod", 5, "did you mean 'in_flight_decode'?"),
        ("sum(ctx_tokens)", 1, "unknown function 'sum'"),
        ("ctx_tokens(1)", 1, "ctx_tokens is a variable"),
        ("1 +", 4, "ends too early"),
    ],
)
def test_error_column_of_a_step_formula(text, column, message):
    with pytest.raises(FormulaError) as caught:
        compile_step(text)
    assert message in caught.value.message
    assert caught.value.column == column


def test_the_limit_of_parts_is_that_of_cost_formulas():
    compile_prefill("+".join(["1"] * 32))
    with pytest.raises(FormulaError, match="more than 64 parts"):
        compile_prefill("+".join(["1"] * 33))


def test_names_behind_the_scenes_are_unknown():
    for name in ("m", "len", "inf", "nan_min", "_v0", "__builtins__"):
        for compile_text in (compile_prefill, compile_step):
            with pytest.raises(FormulaError, match="unknown variable"):
                compile_text(name)


# ---- results without a value --------------------------------------------------------------------


def test_what_is_too_large_saturates_and_keeps_its_place():
    assert single("exp(total_new_tokens)", 10_000) == math.inf
    assert single("1 / (1 + exp(total_new_tokens))", 10_000) == 0
    assert single("pow(total_new_tokens, 400)", 10_000) == math.inf
    assert single("pow(-total_new_tokens, 401)", 10_000) == -math.inf
    assert single("pow(-total_new_tokens, 400)", 10_000) == math.inf
    assert batch("(total_new_tokens * 1e100) ^ 8", (10,), (20,)) == math.inf
    assert single("exp(1) + pow(2, 3)", 1) == pytest.approx(math.e + 8)


@pytest.mark.parametrize("text", ["1 / sum(has_cached)", "log(sum(has_cached))", "sqrt(-batch_size)", "pow(-2, 0.5)"])
def test_what_has_no_value_raises(text):
    for run in (lambda: single(text, 5), lambda: batch(text, (5,), (6,))):
        with pytest.raises((ArithmeticError, ValueError)):
            run()


def test_a_branch_that_is_not_taken_is_not_computed():
    text = "sum(1 / has_cached) if total_cached_tokens > 0 else max(1 / total_new_tokens, total_new_tokens / 10)"
    assert batch(text, (5,), (15,)) == 2
    assert single(text, 20) == 2
    assert batch(text, (5, 1), (15, 1)) == 2


def test_a_total_is_computed_once_and_not_in_vain():
    def up_front(text):
        return [name for name in compile_prefill(text).batch.__code__.co_varnames if name != "m"]

    assert up_front("total_new_tokens * total_new_tokens + total_new_tokens") == ["_v0"]
    assert up_front("max_new_tokens * total_new_tokens") == ["_v0", "_v1"]
    assert up_front("total_new_tokens if 2 > 1 else 0") == []


def test_the_names_mean_what_cost_formulas_mean_by_them():
    shared = {*PREFILL_VARIABLES, *STEP_VARIABLES} & set(VARIABLES)
    assert shared == {"prompt_tokens", "cached_tokens", "new_tokens", "in_flight_decode", "ctx_tokens"}
    for name in shared:
        assert (PREFILL_VARIABLES | STEP_VARIABLES)[name].unit == VARIABLES[name].unit
    assert not (set(PREFILL_VARIABLES) | set(STEP_VARIABLES)) & set(FUNCTIONS)
