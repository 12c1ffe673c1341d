"""Prediction formulas: the language of cost formulas with names of their own.

A prefill formula gives the milliseconds of a batch. What belongs to one request can be named inside `sum(...)` only,
which adds up an expression over the batch's members, and what belongs to the whole batch outside of it only: a name
in the wrong place is an error and never a silent 0. A single request is a batch of one; for it the formula is
compiled a second time, with `sum(x)` written as `x` and every total as that request's own value.

Results are raw: they may be NaN, infinite, negative or impossible to compute. `predictor.py` makes them usable.
"""

import ast
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gateway.core.formula_code import NAMESPACE, Emitter, Value, evaluate, loop_locals
from gateway.core.formula_syntax import Syntax
from gateway.core.variables import COLUMN_BOUND

Member = tuple[int, int, int, int]
"""One request of a batch: `(prompt_tokens, cached_tokens, new_tokens, has_cached)`."""

_EACH = "for prompt_tokens, cached_tokens, new_tokens, has_cached in m"


class Named(NamedTuple):
    """A variable: its unit, whether it is of one request of the batch, and its text for a single one and for many."""

    unit: str
    is_of_request: bool
    single: str
    many: str


def _plain(name: str, unit: str, *, is_of_request: bool) -> Named:
    return Named(unit, is_of_request, single=name, many=name)


def _of_batch(function: str, name: str) -> Named:
    return Named("tokens", is_of_request=False, single=name, many=f"{function}([{name} {_EACH}])")


PREFILL_VARIABLES: dict[str, Named] = {
    "prompt_tokens": _plain("prompt_tokens", "tokens", is_of_request=True),
    "cached_tokens": _plain("cached_tokens", "tokens", is_of_request=True),
    "new_tokens": _plain("new_tokens", "tokens", is_of_request=True),
    "has_cached": _plain("has_cached", "0 or 1", is_of_request=True),
    "batch_size": Named("requests", is_of_request=False, single="1", many="len(m)"),
    "total_prompt_tokens": _of_batch("sum", "prompt_tokens"),
    "total_cached_tokens": _of_batch("sum", "cached_tokens"),
    "total_new_tokens": _of_batch("sum", "new_tokens"),
    "max_prompt_tokens": _of_batch("max", "prompt_tokens"),
    "max_new_tokens": _of_batch("max", "new_tokens"),
}
"""What a prefill formula can name. `docs/scheduling.md` lists the same."""

STEP_VARIABLES: dict[str, Named] = {
    "in_flight_decode": _plain("in_flight_decode", "requests", is_of_request=False),
    "ctx_tokens": _plain("ctx_tokens", "tokens", is_of_request=False),
}
"""What a step formula can name, in the order of the compiled formula's arguments."""


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _pow(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf


# Saturating, so that what is too large to compute stays larger than everything else, and 1 / exp(x) becomes 0.
_NAMESPACE = NAMESPACE | {"exp": _exp, "pow": _pow, "sum": sum, "len": len}


class PrefillFormula(NamedTuple):
    """A compiled prefill formula, in milliseconds.

    `single(prompt_tokens, cached_tokens, new_tokens, has_cached)` is `batch` of that one member, at a fraction of its
    cost. Either may raise ArithmeticError or ValueError. `batch` takes at least one member.
    """

    text: str
    single: Callable[[int, int, int, int], float]
    batch: Callable[[list[Member]], float]


class StepFormula(NamedTuple):
    """A compiled step formula, in milliseconds: `step(in_flight_decode, ctx_tokens)`. May raise as `PrefillFormula`."""

    text: str
    step: Callable[[int, int], float]


def compile_prefill(text: str) -> PrefillFormula:
    """Compile a formula of a batch's prefill time. Raises `FormulaError` with the column of the first fault."""
    single = _write(text, PREFILL_VARIABLES, ("sum",), is_single=True)
    batch = _write(text, PREFILL_VARIABLES, ("sum",), is_single=False)
    return PrefillFormula(
        text=text,
        single=evaluate(f"lambda prompt_tokens, cached_tokens, new_tokens, has_cached: {single}", _NAMESPACE),
        batch=evaluate(f"lambda m: {batch}", _NAMESPACE),
    )


def compile_step(text: str) -> StepFormula:
    """Compile a formula of one decode step's time. Raises `FormulaError` with the column of the first fault."""
    source = _write(text, STEP_VARIABLES, (), is_single=True)
    return StepFormula(text, evaluate(f"lambda {', '.join(STEP_VARIABLES)}: {source}", _NAMESPACE))


def _write(text: str, variables: Mapping[str, Named], aggregates: tuple[str, ...], *, is_single: bool) -> str:
    syntax = Syntax(text)
    emitter = Emitter(syntax, _Names(syntax, variables, aggregates, is_single=is_single))
    value = emitter.emit(syntax.tree)
    if not emitter.locals:
        return value.text
    # Assignments inside an expression: a comprehension around it would cost a call.
    return f"({', '.join(f'{name} := {local}' for name, local in emitter.locals)}, {value.text})[-1]"


class _Names:
    """The names of one prediction formula, written for a single request or for many."""

    def __init__(
        self, syntax: Syntax, variables: Mapping[str, Named], aggregates: tuple[str, ...], *, is_single: bool
    ) -> None:
        self.variables = variables.keys()
        self.aggregates = aggregates
        self._syntax = syntax
        self._named = variables
        self._is_single = is_single
        self._in_sum = False

    def value(self, node: ast.Name, emitter: Emitter) -> Value:
        name, variable = node.id, self._named[node.id]
        if variable.is_of_request and not self._in_sum:
            raise self._syntax.error(node, self._outside_sum(name))
        if self._in_sum and not variable.is_of_request:
            raise self._syntax.error(node, f"{name} is of the whole batch and can't be inside sum(...)")
        if self._is_single or variable.is_of_request:
            return Value(variable.single, COLUMN_BOUND, is_integer=True, is_atom=True)
        return emitter.once(name, variable.many, COLUMN_BOUND, is_integer=True)

    def aggregate(self, node: ast.Call, name: str, emitter: Emitter) -> Value:
        if self._in_sum:
            raise self._syntax.error(node, f"{name} can't be inside another {name}")
        self._in_sum = True
        inner = emitter if self._is_single else Emitter(self._syntax, self)
        value = inner.emit(node.args[0])
        self._in_sum = False
        if self._is_single:
            return value
        bound = value.bound * COLUMN_BOUND if value.is_finite else math.inf
        return Value(f"sum([{value.text} {_EACH}{loop_locals(inner.locals)}])", bound, value.is_integer)

    def _outside_sum(self, name: str) -> str:
        total = f"total_{name}"
        return f"{name} is of one request: wrap it in sum(...)" + (f" or use {total}" if total in self._named else "")
