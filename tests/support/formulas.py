"""A second, slow implementation of the formula language, and generators for fuzzing the real one.

A tree is a number, a name, or a tuple `(operation, *operands)`.
"""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.support.policies import make_table

_COLUMNS = ("in_flight", "queued_tokens", "ctx_tokens", "reported_running", "reported_waiting", "running", "waiting")
_MILLISECONDS = ("head_age_ms", "snapshot_age_ms", "queued_ms", "step_ms", "prefill_ms")
_NAMES = (*_COLUMNS, *_MILLISECONDS, "kv_usage", "kv_capacity_tokens", "new_tokens", "priority")


@dataclass(frozen=True)
class RequestFacts:
    now: float = 100.0
    prompt_tokens: int = 10
    cached_tokens: int = 0
    new_tokens: int = 10
    max_tokens: int = 5
    priority: int = 0
    prefill_ms: float = 2.5

    def arguments(self):
        return (
            self.now,
            self.prompt_tokens,
            self.cached_tokens,
            self.new_tokens,
            self.max_tokens,
            self.priority,
            self.prefill_ms,
        )


# ---- generators ---------------------------------------------------------------------------------

_numbers = st.one_of(st.integers(0, 50), st.sampled_from([0.0, 0.5, 2.5, 1e6, 1e-3, 1e308]))


def _grow(children):
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "/"]), children, children),
        st.tuples(st.just("neg"), children),
        st.tuples(st.just("not"), children),
        st.tuples(st.just("^"), children, st.sampled_from([0, 1, 2, 3, 0.5, -1])),
        st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), children, children),
        st.tuples(st.sampled_from(["and", "or"]), children, children),
        st.tuples(st.just("if"), children, children, children),
        st.tuples(st.sampled_from(["min", "max"]), children, children),
        st.tuples(st.sampled_from(["min", "max"]), children, children, children),
        st.tuples(st.sampled_from(["abs", "sqrt", "log", "exp"]), children),
        st.tuples(st.just("pow"), children, children),
    )


def formulas():
    return st.recursive(st.one_of(_numbers, st.sampled_from(_NAMES)), _grow, max_leaves=14)


@st.composite
def tables(draw):
    table = make_table(draw(st.integers(1, 4)))
    for rank in range(table.size):
        for column in _COLUMNS:
            getattr(table, column)[rank] = draw(st.sampled_from([0, 1, 2, 7, 1000, 10**9, 10**15]))
        table.step_us[rank] = draw(st.sampled_from([0, 1, 33_333]))
        table.head_credit_us[rank] = draw(st.sampled_from([0, 1, 10**9]))
        table.pending_us[rank] = table.head_credit_us[rank] + draw(st.sampled_from([0, 7]))
        table.own_tokens[rank] = draw(st.integers(0, 300_000))
        table.kv_capacity_tokens[rank] = draw(st.sampled_from([1.0, 200_000.0, math.inf]))
        table.kv_usage[rank] = draw(st.floats(0, 1))
        table.snapshot_at[rank] = draw(st.one_of(st.none(), st.floats(0, 100)))
        table.head_since[rank] = draw(st.one_of(st.none(), st.floats(0, 100)))
    return table


# ---- printing with as few parentheses as the grammar allows -------------------------------------

_LEVEL = {"if": 0, "or": 1, "and": 2, "not": 3, "<": 4, "<=": 4, ">": 4, ">=": 4, "==": 4, "!=": 4}
_LEVEL |= {"+": 5, "-": 5, "*": 6, "/": 6, "neg": 7, "^": 8}
_ATOM = 9


def _level(tree):
    return _LEVEL.get(tree[0], _ATOM) if isinstance(tree, tuple) else _ATOM


def print_tree(tree):
    def part(operand, least):
        text = print_tree(operand)
        return text if _level(operand) >= least else f"({text})"

    match tree:
        case int() | float():
            return repr(tree)
        case str():
            return tree
        case ("neg", operand):
            # A sign before a power must be parenthesised in this language.
            return "-" + part(operand, _ATOM if _level(operand) == _LEVEL["^"] else _LEVEL["neg"])
        case ("not", operand):
            return "not " + part(operand, _LEVEL["not"])
        case ("^", base, exponent):
            return f"{part(base, _ATOM)}^{exponent}"
        case ("if", test, then, other):
            return f"{part(then, 1)} if {part(test, 1)} else {part(other, 0)}"
        case (("+" | "-" | "*" | "/" | "and" | "or") as operator, left, right):
            return f"{part(left, _LEVEL[operator])} {operator} {part(right, _LEVEL[operator] + 1)}"
        case (("<" | "<=" | ">" | ">=" | "==" | "!=") as operator, left, right):
            return f"{part(left, 5)} {operator} {part(right, 5)}"
        case (function, *arguments):
            return f"{function}({', '.join(print_tree(argument) for argument in arguments)})"
    raise AssertionError(tree)


# ---- evaluating ---------------------------------------------------------------------------------


def values_of(table, rank, request):
    """The values of every generated name, from their definitions."""
    values = {column: getattr(table, column)[rank] for column in _COLUMNS}
    reported_at, head_since = table.snapshot_at[rank], table.head_since[rank]
    done_us = 0 if head_since is None else min((request.now - head_since) * 5e5, table.head_credit_us[rank])
    own_share = min(1.0, table.own_tokens[rank] / table.kv_capacity_tokens[rank])
    return values | {
        "kv_usage": own_share if reported_at is None else table.kv_usage[rank],
        "kv_capacity_tokens": table.kv_capacity_tokens[rank],
        "head_age_ms": 0.0 if head_since is None else (request.now - head_since) * 1000,
        "snapshot_age_ms": math.inf if reported_at is None else (request.now - reported_at) * 1000,
        "queued_ms": 0.0 if head_since is None else (table.pending_us[rank] - done_us) / 1000,
        "step_ms": table.step_us[rank] / 1000,
        "prefill_ms": request.prefill_ms,
        "new_tokens": request.new_tokens,
        "priority": request.priority,
    }


def evaluate(tree, values):
    """The value, possibly NaN or infinite; None where there is none."""
    try:
        return _walk(tree, values)
    except (ArithmeticError, ValueError):
        return None


def _walk(tree, values):
    match tree:
        case int() | float():
            return tree
        case str():
            return values[tree]
        case ("if", test, then, other):
            return _walk(then if _walk(test, values) else other, values)
        case ("and", left, right):
            first = _walk(left, values)
            return _walk(right, values) if first else first
        case ("or", left, right):
            first = _walk(left, values)
            return first or _walk(right, values)
        case (operation, *operands):
            return _OPERATIONS[operation](*[_walk(operand, values) for operand in operands])
    raise AssertionError(tree)


def _extreme(pick):
    return lambda *numbers: math.nan if any(map(math.isnan, numbers)) else pick(numbers)


_OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "neg": lambda a: -a,
    "not": lambda a: not a,
    "^": math.pow,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "min": _extreme(min),
    "max": _extreme(max),
    "abs": abs,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "pow": math.pow,
}
