"""Prediction formulas against a slow evaluator, one request against a batch of one, and hostile text."""

import math
from types import CodeType

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gateway.core.formula import FormulaError
from gateway.core.formula_syntax import MAX_CHARS, MAX_NODES
from gateway.core.predictor_formula import PREFILL_VARIABLES, compile_prefill
from gateway.core.variables import FUNCTIONS
from tests.support.formulas import evaluate, print_tree


def member(prompt_tokens, cached_tokens=0):
    return (prompt_tokens, cached_tokens, max(1, prompt_tokens - cached_tokens), int(cached_tokens > 0))


# ---- one and many, fast and slow ----------------------------------------------------------------

_numbers = st.one_of(st.integers(0, 50), st.sampled_from([0.0, 0.5, 2.5, 1e6, 1e-3, 1e308]))
_REQUEST = sorted(name for name, variable in PREFILL_VARIABLES.items() if variable.is_of_request)
_BATCH = sorted(set(PREFILL_VARIABLES) - set(_REQUEST))


def _grow(children):
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "/"]), children, children),
        st.tuples(st.sampled_from(["neg", "not"]), children),
        st.tuples(st.just("^"), children, st.sampled_from([0, 1, 2, 3, 0.5, -1])),
        st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), children, children),
        st.tuples(st.sampled_from(["and", "or", "min", "max", "pow"]), children, children),
        st.tuples(st.sampled_from(["if", "min", "max"]), children, children, children),
        st.tuples(st.sampled_from(["abs", "sqrt", "log", "exp"]), children),
    )


_of_request = st.recursive(st.one_of(_numbers, st.sampled_from(_REQUEST)), _grow, max_leaves=5)
_sums = st.tuples(st.just("sum"), _of_request)
_prefill = st.recursive(st.one_of(_numbers, st.sampled_from(_BATCH), _sums), _grow, max_leaves=6)
_sizes = st.tuples(st.integers(0, 200_000), st.integers(0, 200_000)).map(lambda size: (size[0], min(size)))


def compiled_or_refused(text):
    """The formula, or the error in its place."""
    try:
        return compile_prefill(text)
    except FormulaError as error:
        return error


def compiled(tree):
    """The formula of a tree. Discards the example if the tree is too large for the language."""
    formula = compiled_or_refused(print_tree(tree))
    if isinstance(formula, FormulaError):
        assert f"more than {MAX_NODES}" in formula.message or f"at most {MAX_CHARS}" in formula.message
        assume(False)
    return formula


def result(function, *arguments):
    """A formula's result; None if it has none."""
    try:
        return float(function(*arguments))
    except (ArithmeticError, ValueError):
        return None


class Values(dict):
    """Batch values by name, and sums by their tree, computed when they are asked for."""

    def __init__(self, members):
        columns = zip(*members, strict=True)
        names = dict(zip(("prompt_tokens", "cached_tokens", "new_tokens", "has_cached"), columns, strict=True))
        super().__init__(
            batch_size=len(members),
            total_prompt_tokens=sum(names["prompt_tokens"]),
            total_cached_tokens=sum(names["cached_tokens"]),
            total_new_tokens=sum(names["new_tokens"]),
            max_prompt_tokens=max(names["prompt_tokens"]),
            max_new_tokens=max(names["new_tokens"]),
        )
        self.sums = {}
        self.rows = [{name: column[number] for name, column in names.items()} for number in range(len(members))]

    def without_sums(self, tree):
        """The tree with a name in the place of each sum."""
        if not isinstance(tree, tuple):
            return tree
        if tree[0] == "sum":
            name = f"sum{len(self.sums)}"
            self.sums[name] = tree[1]
            return name
        return (tree[0], *map(self.without_sums, tree[1:]))

    def __missing__(self, name):
        total = 0
        for row in self.rows:
            value = evaluate(self.sums[name], row)
            if value is None:
                raise ZeroDivisionError
            total += value
        return total


@settings(max_examples=300, deadline=None)
@given(tree=_prefill, sizes=st.lists(_sizes, min_size=1, max_size=4))
def test_agrees_with_a_tree_walk(tree, sizes):
    formula = compiled(tree)
    members = [member(*size) for size in sizes]
    values = Values(members)
    expected = evaluate(values.without_sums(tree), values)
    actual = result(formula.batch, members)
    if expected is not None:  # what overflows is None there and saturates here
        try:
            expected = float(expected)
        except OverflowError:
            expected = None
        assert actual == pytest.approx(expected, nan_ok=True, rel=1e-9), formula.text


@settings(max_examples=300, deadline=None)
@given(tree=_prefill, size=_sizes)
def test_a_batch_of_one_is_a_single_request(tree, size):
    formula = compiled(tree)
    one, many = result(formula.single, *member(*size)), result(formula.batch, [member(*size)])
    assert one == many or (one is not None and many is not None and math.isnan(one) and math.isnan(many)), formula.text


# ---- hostile text -------------------------------------------------------------------------------

_WORDS = "__import__ lambda for in if else exec os getattr m len sum sum( max new_tokens batch_size _v0 yield 1e9 **"
_FRAGMENTS = st.sampled_from([*"()+-*/^<>=,.:;[]{}'\"\\@%&|~!#\n 019ej_", *_WORDS.split()])
_ALLOWED = set(FUNCTIONS) | {"sum", "len", "inf", "nan_min", "nan_max"}


def names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(_FRAGMENTS, max_size=30).map("".join), st.text(max_size=60)))
@example("__import__('os').system('true')")
@example("sum.__self__")
@example("sum(new_tokens)(1)")
@example("sum(new_tokens for _ in 1)")
def test_text_is_refused_or_becomes_arithmetic_only(text):
    formula = compiled_or_refused(text)
    if isinstance(formula, FormulaError):
        assert 1 <= formula.column <= len(text) + 1
        return
    for function in (formula.single, formula.batch):
        assert names_in(function.__code__) <= _ALLOWED
        assert function.__globals__["__builtins__"] == {}
