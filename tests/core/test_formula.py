"""Formulas: what parses, where errors point, and that compiled code agrees with a slow evaluator."""

import math
from types import CodeType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.formula import Formula, FormulaError, compile_cost
from gateway.core.formula_syntax import MAX_CHARS, MAX_NODES
from gateway.core.variables import AGGREGATES, FUNCTIONS, VARIABLES, Scope
from tests.support.formulas import RequestFacts, evaluate, formulas, print_tree, tables, values_of
from tests.support.policies import charge, make_table, report


def costs_of(text, table, request=None):
    return run(compile_cost(text), table, request or RequestFacts())


def compiled_or_refused(text):
    """The formula, or the error in its place."""
    try:
        return compile_cost(text)
    except FormulaError as error:
        return error


def run(formula: Formula, table, request: RequestFacts):
    assert not formula.aggregates
    return formula.expression.all_ranks(table, table.size, 2, 1)(*request.arguments())


# ---- the language -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 * 3 ^ 2", 18),
        ("(-2) ^ 2", 4),
        ("-(2 ^ 2)", -4),
        ("2 ^ -1", 0.5),
        ("-2 - -3", 1),
        ("+5", 5),
        ("7 / 2", 3.5),
        (".5 + 1. + 1e1", 11.5),
        ("1 if 2 > 1 else 0", 1),
        ("1 < 2 < 3", 1),
        ("1 < 2 > 5", 0),
        ("3 * (2 >= 2) + (1 != 1) + (1 == 1) + (1 <= 0)", 4),
        ("not 0", 1),
        ("not 2 ^ 2", 0),
        ("1 > 2 or 5 > 4 and 1", 1),
        ("min(3, 1, 2) + max(3, 1, 2) + abs(-4)", 8),
        ("max(1, 2) - min(1, 2)", 1),
        ("sqrt(16) + log(1) + exp(0) + pow(2, 10)", 1029),
        ("  1\n +\n\t2  ", 3),
        ("log(exp(3))", 3),
    ],
)
def test_value(text, expected):
    assert costs_of(text, make_table(2)) == [pytest.approx(expected)] * 2


def test_all_variables_of_one_rank():
    table = make_table(2)
    charge(table, 1, prompt_tokens=300)
    charge(table, 1, prompt_tokens=20)
    report(table, 1, running=5, waiting=3, kv=0.25, at=8.0)
    table.in_flight_decode[1], table.in_flight_prefill[1] = 1, 1
    table.ctx_tokens[1] = 70
    table.head_since[1] = 9.5
    table.sent_since_snapshot[1] = 4
    table.pending_us[1], table.head_credit_us[1], table.step_us[1], table.mean_out_tokens[1] = (
        700_000,
        10**9,
        12_500,
        64,
    )
    expected = {
        "in_flight": 2,
        "in_flight_prefill": 1,
        "in_flight_decode": 1,
        "queued_tokens": 320,
        "ctx_tokens": 70,
        "sent_since_snapshot": 4,
        "reported_running": 5,
        "reported_waiting": 3,
        "running": 5,
        "waiting": 3,
        "foreign": 6,
        "kv_usage": 0.25,
        "kv_capacity_tokens": 200_000.0,
        "head_age_ms": 500.0,
        "queued_ms": 450.0,
        "step_ms": 12.5,
        "mean_out_tokens": 64,
        "snapshot_age_ms": 2000.0,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "new_tokens": 60,
        "max_tokens": 7,
        "priority": 3,
        "prefill_ms": 42.5,
        "ranks": 2,
        "gateways": 2,
        "coupled": 1,
    }
    assert expected.keys() == VARIABLES.keys()
    request = RequestFacts(
        10.0, prompt_tokens=100, cached_tokens=40, new_tokens=60, max_tokens=7, priority=3, prefill_ms=42.5
    )
    for name, value in expected.items():
        assert costs_of(name, table, request)[1] == pytest.approx(value), name


def test_values_without_a_report():
    table = make_table(2)
    charge(table, 0, prompt_tokens=50_000)
    assert costs_of("kv_usage", table) == [0.25, 0.0]
    assert costs_of("snapshot_age_ms", table) == [math.inf, math.inf]
    assert costs_of("head_age_ms + reported_waiting + reported_running + running + waiting + foreign", table) == [0, 0]
    table.own_tokens[0] = 10**9
    assert costs_of("kv_usage", table) == [1.0, 0.0]
    table.kv_capacity_tokens[0] = math.inf
    assert costs_of("kv_usage", table) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "empty"),
        (" \n ", 1, "empty"),
        ("in_flight + waitin", 13, "unknown variable 'waitin'; did you mean 'waiting'?"),
        ("2^2 + 3^2 + waitin", 13, "did you mean 'waiting'?"),
        ("in_flight +\n  zzzz", 15, "unknown variable 'zzzz'"),
        ("in_flight + sum(waiting)", 13, "unknown function 'sum'"),
        ("batch_size", 1, "unknown variable 'batch_size'"),
        ("1 + mx(1, 2)", 5, "unknown function 'mx'; did you mean 'max'?"),
        ("1 + max", 5, "max is a function"),
        ("fleet_min + 1", 1, "fleet_min is a function"),
        ("in_flight(2)", 1, "is a variable"),
        ("min(1)", 1, "min takes 2 to 16 argument(s), not 1"),
        ("1 + log(1, 2)", 5, "log takes 1 argument(s), not 2"),
        ("abs()", 1, "abs takes 1 argument(s), not 0"),
        ("fleet_max(1, 2)", 1, "fleet_max takes 1 argument(s), not 2"),
        ("1 + fleet_mean(prompt_tokens)", 16, "needs a variable of rank scope"),
        ("fleet_min(fleet_max(in_flight))", 11, "needs a variable of rank scope"),
        ("1 - -2^2", 5, "needs parentheses"),
        ("-in_flight^2", 1, "needs parentheses"),
        ("-(in_flight)^2", 1, "needs parentheses"),
        ("2 ^ in_flight", 5, "the exponent of ^ must be a number from -8 to 8"),
        ("2 ^ 9", 5, "the exponent of ^"),
        ("2 ^ -9", 5, "the exponent of ^"),
        ("2 ^ 3 ^ 2", 5, "the exponent of ^"),
        ("2 ** 3", 3, "write ^ for powers"),
        ("2 // 3", 3, "there is no //"),
        ("7 % 3", 3, "unexpected character '%'"),
        ("1 << 2", 1, "only + - * / and ^"),
        ("a.b", 2, "unexpected character '.'"),
        ("in_flight[0]", 10, "unexpected character '['"),
        ("'x'", 1, 'unexpected character "\'"'),
        ("1 + 1e999", 5, "too large"),
        ("1 + 99999999999999999999", 5, "too large to be exact"),
        ("1 + 12ab", 5, "'12a' is not a number"),
        ("0x10", 1, "is not a number"),
        ("1_000", 1, "is not a number"),
        ("1.2.3", 1, "is not a number"),
        ("3j", 1, "is not a number"),
        ("1 + 007", 5, "no leading zeros"),
        ("True", 1, "'True' is not part of the formula language"),
        ("None", 1, "'None' is not part"),
        ("lambda", 1, "'lambda' is not part"),
        ("1 + (lambda x: x)", 6, "'lambda' is not part"),
        ("[in_flight for x in y]", 1, "unexpected character '['"),
        ("(x := 1)", 4, "unexpected character ':'"),
        ("max(1, ^2)", 1, "max takes plain arguments only"),
        ("max(*in_flight, 2)", 5, "not part of the formula language"),
        ("(1, 2)", 1, "not part of the formula language"),
        ("max(1, 2)(3)", 1, "only functions can be called"),
        ("1)", 2, "syntax error"),
        ("1) + (2", 2, "syntax error"),
        ("1 +", 4, "ends too early"),
        ("max(1 2)", 5, "forgot a comma"),
        ("1 2", 3, "syntax error"),
        ("1 + (2", 5, "syntax error"),
        ("1 if 2", 1, "syntax error"),
        ("é", 1, "unexpected character"),
        ("1 + \x00", 5, "unexpected character"),
        ("1 + " * 128, MAX_CHARS + 1, "ends too early"),
        ("1 " * 257, MAX_CHARS + 1, f"at most {MAX_CHARS}"),
        ("-" * 500 + "1", MAX_NODES + 1, f"more than {MAX_NODES} parts"),
        ("(" * 400 + "1", None, "syntax error"),
        ("+".join(["1"] * 40), None, f"more than {MAX_NODES} parts"),
    ],
)
def test_error_column(text, column, message):
    with pytest.raises(FormulaError) as caught:
        compile_cost(text)
    assert message in caught.value.message
    if column is not None:
        assert caught.value.column == column
    assert str(caught.value) == f"column {caught.value.column}: {caught.value.message}"


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_a_parser_that_gives_up_is_an_error_of_the_formula(monkeypatch, error):
    def give_up(*args, **options):
        raise error

    monkeypatch.setattr("ast.parse", give_up)
    with pytest.raises(FormulaError, match="nested too deeply"):
        compile_cost("1")


def test_names_behind_the_scenes_are_unknown():
    # Names of generated code and of Python must not leak into the language.
    for name in ("t", "now", "i", "inf", "zip", "nan_min", "_f0", "_v0", "own_tokens", "snapshot_at", "__builtins__"):
        with pytest.raises(FormulaError, match="unknown variable"):
            compile_cost(name)


# ---- what is known before it runs ---------------------------------------------------------------


def test_facts():
    formula = compile_cost("(queued_tokens + new_tokens) * (in_flight + 1) + queued_tokens")
    assert formula.columns == ("queued_tokens", "in_flight")
    assert formula.rank_names == ("queued_tokens", "in_flight")
    assert not formula.can_be_non_finite
    assert formula.expression.is_integer
    assert compile_cost("max_tokens").columns == ()
    assert compile_cost("fleet_min(waiting) + kv_usage").columns == (
        "waiting",
        "kv_usage",
        "snapshot_at",
        "own_tokens",
        "kv_capacity_tokens",
    )


@pytest.mark.parametrize(
    ("text", "can_be"),
    [
        ("in_flight * 2 - kv_usage", False),
        ("in_flight ^ 2", False),
        ("in_flight ^ 0.5", True),
        ("in_flight ^ -1", True),
        ("in_flight / 2", True),
        ("log(1)", True),
        ("sqrt(in_flight)", True),
        ("exp(in_flight)", True),
        ("pow(in_flight, 2)", True),
        ("snapshot_age_ms", True),
        ("kv_capacity_tokens", True),
        ("snapshot_age_ms > 5", True),
        ("min(snapshot_age_ms, 5)", True),
        ("1 if snapshot_age_ms > 5 else 0", True),
        ("1 if in_flight > 5 else 1 / in_flight", True),
        ("in_flight * 1e300", True),
        ("in_flight and 1 / in_flight", True),
        ("fleet_max(in_flight)", False),
        ("fleet_max(1 / in_flight)", True),
        ("1e299 * 0 + abs(in_flight) + (not waiting) + (1 < waiting < 3)", False),
        ("*".join(["queued_tokens"] * 20), True),
        ("(((in_flight ^ 8) ^ 8) ^ 8) ^ 8", True),
    ],
)
def test_can_be_non_finite(text, can_be):
    assert compile_cost(text).can_be_non_finite is can_be


@pytest.mark.parametrize(
    ("text", "is_integer"),
    [
        ("in_flight * 2 - waiting", True),
        ("max(in_flight, 2) + abs(-running) + (not waiting) + (kv_usage > 0.5)", True),
        ("in_flight if kv_usage > 0.5 else waiting", True),
        ("fleet_max(in_flight)", True),
        ("fleet_mean(in_flight)", False),
        ("in_flight / 1", False),
        ("in_flight ^ 2", False),
        ("in_flight * 1.0", False),
        ("kv_usage", False),
        ("in_flight if waiting else 0.5", False),
        ("min(in_flight, 0.5)", False),
        ("in_flight or 0.5", False),
        ("snapshot_age_ms", False),
    ],
)
def test_is_integer(text, is_integer):
    assert compile_cost(text).expression.is_integer is is_integer


def test_powers_do_not_build_huge_integers():
    formula = compile_cost("((((queued_tokens + 9) ^ 8) ^ 8) ^ 8) ^ 8")
    with pytest.raises(OverflowError):
        run(formula, make_table(1), RequestFacts())


# ---- against a slow evaluator -------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(tree=formulas(), table=tables(), request=st.builds(RequestFacts, prompt_tokens=st.integers(1, 5000)))
def test_agrees_with_a_tree_walk(tree, table, request):
    text = print_tree(tree)
    if len(text) > MAX_CHARS:
        return
    formula = compiled_or_refused(text)
    if isinstance(formula, FormulaError):
        assert f"more than {MAX_NODES}" in formula.message
        return
    expected = [evaluate(tree, values_of(table, rank, request)) for rank in range(table.size)]
    single = formula.expression.one_rank(table, table.size, 2, 1)
    for rank, value in enumerate(expected):
        if value is None:
            with pytest.raises((ArithmeticError, ValueError)):
                single(rank, *request.arguments())
        else:
            assert float(single(rank, *request.arguments())) == pytest.approx(float(value), nan_ok=True), text
    if None not in expected:
        values = [float(value) for value in run(formula, table, request)]
        assert values == pytest.approx([float(value) for value in expected], nan_ok=True), text
    if not formula.can_be_non_finite:
        assert all(value is not None and math.isfinite(value) for value in expected), text
    if formula.expression.is_integer and None not in expected:
        assert all(isinstance(value, int) for value in run(formula, table, request)), text


# ---- hostile text -------------------------------------------------------------------------------

_CHARACTERS = "()+-*/^<>=,.:;[]{}'\"\\@%&|~!#\n 019ej_"
_WORDS = "__import__ lambda for in if else exec open import os getattr t now in_flight max fleet_min yield True 1e9 **"
_FRAGMENTS = st.sampled_from([*_CHARACTERS, *_WORDS.split()])


def names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


_ALLOWED = (
    {column for variable in VARIABLES.values() for column in variable.columns}
    | set(FUNCTIONS)
    | {"zip", "inf", "nan_min", "nan_max"}
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(_FRAGMENTS, max_size=30).map("".join), st.text(max_size=60)))
@example("__import__('os').system('true')")
@example("().__class__.__bases__[0].__subclasses__()")
@example("max.__self__")
@example("(in_flight)(1)")
def test_text_is_refused_or_becomes_arithmetic_only(text):
    formula = compiled_or_refused(text)
    if isinstance(formula, FormulaError):
        assert 1 <= formula.column <= len(text) + 1
        return
    for expression in (formula.expression, *(aggregate.expression for aggregate in formula.aggregates)):
        for function in (expression.all_ranks, expression.one_rank):
            assert names_in(function.__code__) <= _ALLOWED
            assert function.__globals__["__builtins__"] == {}


def test_the_tables_are_consistent():
    for variable in VARIABLES.values():
        assert (variable.scope is Scope.RANK) == bool(variable.columns) == bool(variable.expression)
    assert not set(VARIABLES) & (set(FUNCTIONS) | set(AGGREGATES))
