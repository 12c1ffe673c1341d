"""Cost formulas: text -> checked tree -> one Python function that runs over all ranks at once.

The language: numbers, the names of `variables.py`, `+ - * / ^`, comparisons, `and or not`,
`a if condition else b`, and the listed functions. Nothing else parses, so a formula can't reach an
object, a name or an operation that isn't written here. Only text made by `formula_code.py` is compiled.

A compiled formula is one comprehension over `zip` of exactly the columns it reads. What can be
proved finite (`can_be_non_finite` is False) needs no check of its results. Powers are computed in
floating point, so no chain of them can build huge integers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gateway.core.formula_code import Code, Writer
from gateway.core.formula_syntax import FormulaError, Syntax
from gateway.core.variables import FLEET_ARGUMENTS, REQUEST_ARGUMENTS, Scope, Variable

__all__ = ["Aggregate", "Expression", "Formula", "FormulaError", "compile_cost"]


def _nan_min(*values: float) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _nan_max(*values: float) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


_NAMESPACE: dict[str, Any] = {
    "__builtins__": {},
    "abs": abs,
    "inf": math.inf,
    "max": max,
    "min": min,
    "zip": zip,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    # Always a float: integer powers of powers would grow without bound.
    "pow": math.pow,
    "nan_min": _nan_min,
    "nan_max": _nan_max,
}


class Expression(NamedTuple):
    """One compiled expression of rank scope.

    `all_ranks(table, ranks, gateways, coupled)` returns the function `(now, prompt_tokens, cached_tokens,
    new_tokens, max_tokens, priority, *aggregates) -> list of one value per rank`; `one_rank` the same
    with the rank number as first argument and one value as result. Either may raise ArithmeticError or
    ValueError, or give NaN or an infinity, if `can_be_non_finite`. `is_integer`: every value is an int.
    """

    all_ranks: Callable[..., Callable[..., list[float]]]
    one_rank: Callable[..., Callable[..., float]]
    can_be_non_finite: bool
    is_integer: bool


class Aggregate(NamedTuple):
    """A `fleet_*` call: `function` of `expression` over the eligible ranks. Earlier ones are its last arguments."""

    function: str
    expression: Expression


class Formula(NamedTuple):
    """A compiled cost formula and what can be known of it before it runs."""

    text: str
    expression: Expression
    aggregates: tuple[Aggregate, ...]
    columns: tuple[str, ...]
    """Columns of the rank table that are read."""
    rank_names: tuple[str, ...]
    copy_columns: Callable[[object], tuple[list[Any], ...]]
    """`copy_columns(table)`: copies of `columns`, in that order."""
    rank_values: Callable[..., list[tuple[float, ...]]]
    """`rank_values(now, *columns)`: per rank the values of `rank_names`."""

    @property
    def can_be_non_finite(self) -> bool:
        """Whether some state could make a cost NaN, infinite or impossible to compute."""
        return self.expression.can_be_non_finite


def compile_cost(text: str) -> Formula:
    """Compile a cost formula. Raises `FormulaError` with the column of the first fault."""
    writer = Writer(Syntax(text))
    code = writer.write(writer.syntax.tree)
    variables = [variable for variable in writer.used.values() if variable.scope is Scope.RANK]
    columns = tuple(dict.fromkeys(column for variable in variables for column in variable.columns))
    return Formula(
        text=text,
        expression=_compile(code),
        aggregates=tuple(Aggregate(function, _compile(inner)) for function, inner in writer.aggregates),
        columns=columns,
        rank_names=tuple(variable.name for variable in variables),
        copy_columns=_evaluate(f"lambda t: ({''.join(f't.{column}[:], ' for column in columns)})"),
        rank_values=_compile_rank_values(columns, variables),
    )


def _evaluate(source: str) -> Any:
    return eval(source, _NAMESPACE)  # noqa: S307 - generated text only, and no builtins


def _compile(code: Code) -> Expression:
    arguments = ", ".join((*REQUEST_ARGUMENTS, *(f"_f{number}" for number in range(code.aggregates))))
    outer = f"lambda {', '.join(('t', *FLEET_ARGUMENTS))}: lambda"
    every = _loop(code.columns, [f"t.{column}" for column in code.columns])
    single = _loop(code.columns, [f"(t.{column}[i],)" for column in code.columns])
    local = "".join(f" for {name} in [{text}]" for name, text in code.locals)
    return Expression(
        all_ranks=_evaluate(f"{outer} {arguments}: [{code.text} {every}{local}]"),
        one_rank=_evaluate(f"{outer} i, {arguments}: [{code.text} {single}{local}][0]"),
        can_be_non_finite=code.can_be_non_finite,
        is_integer=code.is_integer,
    )


def _compile_rank_values(columns: Sequence[str], variables: Sequence[Variable]) -> Any:
    if not columns:
        return lambda now: []  # noqa: ARG005 - same shape as the generated ones
    values = "".join(f"({variable.expression}), " for variable in variables)
    return _evaluate(f"lambda now, {', '.join(columns)}: [({values}) {_loop(columns, columns)}]")


def _loop(names: Sequence[str], sources: Sequence[str]) -> str:
    """The `for` clause that walks the source lists in parallel; without any, once per rank."""
    if not names:
        return "for _ in t.in_flight"
    if len(names) == 1:
        return f"for {names[0]} in {sources[0]}"
    return f"for {', '.join(names)} in zip({', '.join(sources)})"
