"""Cost formulas: text -> checked tree -> one Python function that runs over all ranks at once.

The language: numbers, the names of `variables.py`, `+ - * / ^`, comparisons, `and or not`,
`a if condition else b`, and the listed functions. Nothing else parses, so a formula can't reach an
object, a name or an operation that isn't written here. Only text made by `formula_code.py` is compiled.

A compiled formula is one comprehension over `zip` of exactly the columns it reads. What can be
proved finite (`can_be_non_finite` is False) needs no check of its results. Powers are computed in
floating point, so no chain of them can build huge integers.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gateway.core.formula_code import FINITE_BOUND, NAMESPACE, Emitter, Value, evaluate, loop_locals
from gateway.core.formula_syntax import FormulaError, Syntax
from gateway.core.variables import AGGREGATES, FLEET_ARGUMENTS, REQUEST_ARGUMENTS, VARIABLES, Scope, Variable

__all__ = ["Aggregate", "Expression", "Formula", "FormulaError", "compile_cost"]


_NAMESPACE = NAMESPACE | {"zip": zip}


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
    writer = _Writer(Syntax(text))
    code = writer.write(writer.syntax.tree)
    variables = [variable for variable in writer.used.values() if variable.scope is Scope.RANK]
    columns = tuple(dict.fromkeys(column for variable in variables for column in variable.columns))
    return Formula(
        text=text,
        expression=_compile(code),
        aggregates=tuple(Aggregate(function, _compile(inner)) for function, inner in writer.aggregates),
        columns=columns,
        rank_names=tuple(variable.name for variable in variables),
        copy_columns=evaluate(f"lambda t: ({''.join(f't.{column}[:], ' for column in columns)})", _NAMESPACE),
        rank_values=_compile_rank_values(columns, variables),
    )


class _Code(NamedTuple):
    """The text of one expression of rank scope and what it needs around it.

    `aggregates` is how many earlier aggregates it may name, as `_f0`, `_f1`, ...
    """

    text: str
    columns: tuple[str, ...]
    locals: tuple[tuple[str, str], ...]
    aggregates: int
    bound: float
    is_integer: bool


class _Writer:
    """The result of one formula: what it names, and the aggregates in the order of their evaluation."""

    def __init__(self, syntax: Syntax) -> None:
        self.syntax = syntax
        self.used: dict[str, Variable] = {}
        self.aggregates: list[tuple[str, _Code]] = []

    def write(self, node: ast.expr) -> _Code:
        """Check and write one expression. Raises `FormulaError`."""
        names = _Names(self)
        emitter = Emitter(self.syntax, names)
        value = emitter.emit(node)
        return _Code(
            text=value.text,
            columns=tuple(names.columns),
            locals=tuple(emitter.locals),
            aggregates=len(self.aggregates),
            bound=value.bound,
            is_integer=value.is_integer,
        )


class _Names:
    """What one expression of rank scope can name, and the columns that it turned out to read."""

    variables = VARIABLES.keys()
    aggregates = AGGREGATES

    def __init__(self, writer: _Writer) -> None:
        self.columns: dict[str, None] = {}
        self._writer = writer

    def value(self, node: ast.Name, emitter: Emitter) -> Value:
        variable = self._writer.used[node.id] = VARIABLES[node.id]
        if variable.scope is Scope.RANK:
            self.columns.update(dict.fromkeys(variable.columns))
            if variable.expression != variable.name:
                text = f"({variable.expression})"
                return emitter.once(variable.name, text, variable.bound, is_integer=variable.is_integer)
        return Value(variable.name, variable.bound, variable.is_integer, is_atom=True)

    def aggregate(self, node: ast.Call, name: str, emitter: Emitter) -> Value:  # noqa: ARG002 - has a walk of its own
        code = self._writer.write(node.args[0])
        if not code.columns:
            raise self._writer.syntax.error(
                node.args[0], f"{name} needs a variable of rank scope: this is the same on every rank"
            )
        self._writer.aggregates.append((name, code))
        is_integer = code.is_integer and name != "fleet_mean"
        return Value(f"_f{len(self._writer.aggregates) - 1}", code.bound, is_integer, is_atom=True)


def _compile(code: _Code) -> Expression:
    arguments = ", ".join((*REQUEST_ARGUMENTS, *(f"_f{number}" for number in range(code.aggregates))))
    outer = f"lambda {', '.join(('t', *FLEET_ARGUMENTS))}: lambda"
    every = _loop(code.columns, [f"t.{column}" for column in code.columns])
    single = _loop(code.columns, [f"(t.{column}[i],)" for column in code.columns])
    local = loop_locals(code.locals)
    return Expression(
        all_ranks=evaluate(f"{outer} {arguments}: [{code.text} {every}{local}]", _NAMESPACE),
        one_rank=evaluate(f"{outer} i, {arguments}: [{code.text} {single}{local}][0]", _NAMESPACE),
        can_be_non_finite=not code.bound < FINITE_BOUND,
        is_integer=code.is_integer,
    )


def _compile_rank_values(columns: Sequence[str], variables: Sequence[Variable]) -> Any:
    if not columns:
        return lambda now: []  # noqa: ARG005 - same shape as the generated ones
    values = "".join(f"({variable.expression}), " for variable in variables)
    return evaluate(f"lambda now, {', '.join(columns)}: [({values}) {_loop(columns, columns)}]", _NAMESPACE)


def _loop(names: Sequence[str], sources: Sequence[str]) -> str:
    """The `for` clause that walks the source lists in parallel; without any, once per rank."""
    if not names:
        return "for _ in t.in_flight"
    if len(names) == 1:
        return f"for {names[0]} in {sources[0]}"
    return f"for {', '.join(names)} in zip({', '.join(sources)})"
