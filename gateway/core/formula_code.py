"""Checks the tree of a formula and writes it as Python text, in one walk.

One language for every kind of formula. What a formula can name, and its functions over several ranks or
requests, is the business of its `Names`: `formula.py` has those of costs, `predictor_formula.py` those of
predictions. The text is put together from the constants of these modules, the names and expressions of
their tables, and `repr` of checked numbers; no character of the user's text gets into it.
"""

import ast
import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from gateway.core.formula_syntax import FormulaError, Syntax
from gateway.core.variables import FUNCTIONS

MAX_EXPONENT = 8
FINITE_BOUND = 1e300
_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# The tokens of the language leave no other unary and comparison operators.
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.UAdd: "+", ast.Not: "not "}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


class Value(NamedTuple):
    """Generated text and what is known of its value.

    `bound` limits the absolute value; infinite also means that evaluating it may raise. `is_integer`:
    it is always a whole number of type int (or bool). `is_atom`: writing it twice costs nothing.
    """

    text: str
    bound: float
    is_integer: bool = False
    is_atom: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether evaluating it can neither raise nor give NaN or an infinity."""
        return self.bound < FINITE_BOUND


class Names(Protocol):
    """What one kind of formula can name: the seam between the language and where its values come from."""

    @property
    def variables(self) -> Collection[str]:
        """The names of all variables."""

    @property
    def aggregates(self) -> Collection[str]:
        """The names of all functions of one expression over many ranks or requests."""

    def value(self, node: ast.Name, emitter: "Emitter") -> Value:
        """Write one of the variables. Raises `FormulaError` where it can't stand."""

    def aggregate(self, node: ast.Call, name: str, emitter: "Emitter") -> Value:
        """Write the call of one of the aggregates, which has one argument. Raises `FormulaError` where it can't stand."""


class Emitter:
    """The walk over one expression.

    `locals` are `(name, text)` pairs of sub-expressions to compute before the result, in order. Only values that
    can't raise go there, and none out of a branch that may not be taken.
    """

    def __init__(self, syntax: Syntax, names: Names) -> None:
        self.locals: list[tuple[str, str]] = []
        self._syntax = syntax
        self._names = names
        self._local_variables: dict[str, str] = {}
        self._branches = 0

    def emit(self, node: ast.expr) -> Value:
        """Check and write an expression. Raises `FormulaError`."""
        self._syntax.count(node)
        match node:
            case ast.Constant(value=int() | float() as number):
                return Value(repr(number), abs(float(number)), isinstance(number, int), is_atom=True)
            case ast.Name():
                if node.id not in self._names.variables:
                    raise self._unknown(node, node.id, self._names.variables)
                return self._names.value(node, self)
            case ast.BinOp(op=ast.Pow()):
                return self._power(node)
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.Call():
                return self._call(node)
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp():
                return self._boolean(node)
            case ast.IfExp():
                return self._conditional(node)
        raise self._syntax.error(node, "this is not part of the formula language")

    def once(self, name: str, text: str, bound: float, *, is_integer: bool) -> Value:
        """The variable `name`, which is `text`: computed once however often it is used, but never in vain."""
        local = self._local_variables.get(name)
        if local is None:
            if self._branches:
                return Value(text, bound, is_integer)
            local = self._local_variables[name] = self._local(text)
        return Value(local, bound, is_integer, is_atom=True)

    def _local(self, text: str) -> str:
        name = f"_v{len(self.locals)}"
        self.locals.append((name, text))
        return name

    def _binary(self, node: ast.BinOp) -> Value:
        operator = _BINARY.get(type(node.op))
        if operator is None:
            raise self._syntax.error(node, "only + - * / and ^ combine numbers")
        left, right = self.emit(node.left), self.emit(node.right)
        if operator == "/":
            bound = math.inf
        elif operator == "*":
            # inf * 0 is NaN, and NaN would pass for a small bound.
            bound = left.bound * right.bound if left.is_finite and right.is_finite else math.inf
        else:
            bound = left.bound + right.bound
        is_integer = operator != "/" and left.is_integer and right.is_integer
        return Value(f"({left.text} {operator} {right.text})", bound, is_integer)

    def _power(self, node: ast.BinOp) -> Value:
        base = self.emit(node.left)
        exponent = self.emit(node.right)
        literal = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
        if not isinstance(literal, ast.Constant) or exponent.bound > MAX_EXPONENT:
            raise self._syntax.error(
                node.right,
                f"the exponent of ^ must be a number from -{MAX_EXPONENT} to {MAX_EXPONENT}; else use pow(x, y)",
            )
        return Value(f"pow({base.text}, {exponent.text})", self._power_bound(base, node.right))

    def _power_bound(self, base: Value, exponent: ast.expr) -> float:
        """Finite for whole exponents from 0; others divide by zero or have no real value somewhere."""
        match exponent:
            case ast.Constant(value=int() | float() as number) if float(number).is_integer() and base.is_finite:
                # In logarithms, since the power itself may overflow.
                digits = math.log10(max(1.0, base.bound)) * number
                return max(1.0, base.bound) ** number if digits < math.log10(FINITE_BOUND) else math.inf
        return math.inf

    def _unary(self, node: ast.UnaryOp) -> Value:
        operand = node.operand
        symbol = _UNARY[type(node.op)]
        is_power = isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Pow)
        if is_power and symbol != "not " and not self._syntax.has_parenthesis_between(node, operand):
            raise self._syntax.error(node, "a sign before a power needs parentheses: (-x)^y or -(x^y)")
        value = self.emit(operand)
        if symbol == "not ":
            return Value(f"(not {value.text})", 1.0 if value.is_finite else math.inf, is_integer=True)
        return Value(f"({symbol}{value.text})", value.bound, value.is_integer)

    def _compare(self, node: ast.Compare) -> Value:
        left = self.emit(node.left)
        text, is_finite = left.text, left.is_finite
        for number, (operator, operand) in enumerate(zip(node.ops, node.comparators, strict=True)):
            # Later operands of a < b < c are skipped when an earlier pair fails.
            value = self._branch(operand) if number else self.emit(operand)
            text += f" {_COMPARE[type(operator)]} {value.text}"
            is_finite = is_finite and value.is_finite
        return Value(f"({text})", 1.0 if is_finite else math.inf, is_integer=True)

    def _boolean(self, node: ast.BoolOp) -> Value:
        word = " and " if isinstance(node.op, ast.And) else " or "
        values = [self._branch(operand) if number else self.emit(operand) for number, operand in enumerate(node.values)]
        return Value(f"({word.join(value.text for value in values)})", *_joined(values))

    def _conditional(self, node: ast.IfExp) -> Value:
        test = self.emit(node.test)
        then, other = self._branch(node.body), self._branch(node.orelse)
        bound, is_integer = _joined([then, other])
        return Value(
            f"({then.text} if {test.text} else {other.text})", bound if test.is_finite else math.inf, is_integer
        )

    def _branch(self, node: ast.expr) -> Value:
        self._branches += 1
        value = self.emit(node)
        self._branches -= 1
        return value

    def _call(self, node: ast.Call) -> Value:
        if not isinstance(node.func, ast.Name):
            raise self._syntax.error(node, "only functions can be called")
        name = node.func.id
        if node.keywords:
            raise self._syntax.error(node, f"{name} takes plain arguments only")
        is_aggregate = name in self._names.aggregates
        if not is_aggregate and name not in FUNCTIONS:
            raise self._unknown(node, name, (*FUNCTIONS, *self._names.aggregates), kind="function")
        least, most = FUNCTIONS[name] if not is_aggregate else (1, 1)
        if not least <= len(node.args) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise self._syntax.error(node, f"{name} takes {wanted} argument(s), not {len(node.args)}")
        if is_aggregate:
            return self._names.aggregate(node, name, self)
        values = [self.emit(argument) for argument in node.args]
        if name in ("min", "max"):
            return self._extreme(name, values)
        bound, is_integer = _joined(values) if name == "abs" else (math.inf, False)
        return Value(f"{name}({', '.join(value.text for value in values)})", bound, is_integer)

    def _extreme(self, name: str, values: list[Value]) -> Value:
        bound, is_integer = _joined(values)
        texts = [value.text for value in values]
        if not bound < FINITE_BOUND:
            # Python's own min and max drop or keep a NaN depending on its place.
            return Value(f"nan_{name}({', '.join(texts)})", bound, is_integer)
        if len(values) == 2 and (not self._branches or all(value.is_atom for value in values)):
            # Written out it takes a third of the call's time.
            left, right = (value.text if value.is_atom else self._local(value.text) for value in values)
            return Value(f"({left} if {left} {'<' if name == 'min' else '>'} {right} else {right})", bound, is_integer)
        return Value(f"{name}({', '.join(texts)})", bound, is_integer)

    def _unknown(self, node: ast.expr, name: str, known: Iterable[str], kind: str = "variable") -> FormulaError:
        if name in FUNCTIONS or name in self._names.aggregates:
            return self._syntax.error(node, f"{name} is a function: write {name}(...)")
        if kind == "function" and name in self._names.variables:
            return self._syntax.error(node, f"{name} is a variable and can't be called")
        close = difflib.get_close_matches(name, list(known), n=1)
        suggestion = f"; did you mean {close[0]!r}?" if close else ""
        return self._syntax.error(node, f"unknown {kind} {name!r}{suggestion}")


def _joined(values: Sequence[Value]) -> tuple[float, bool]:
    """Bound and integrality of something that is always one of the values."""
    return max(value.bound for value in values), all(value.is_integer for value in values)


# ---- running what was written -------------------------------------------------------------------


def _nan_min(*values: float) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _nan_max(*values: float) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


NAMESPACE: dict[str, Any] = {
    "__builtins__": {},
    "abs": abs,
    "inf": math.inf,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    # Always a float: integer powers of powers would grow without bound.
    "pow": math.pow,
    "nan_min": _nan_min,
    "nan_max": _nan_max,
}
"""What generated text can name besides its arguments. Each kind of formula adds its own."""


def evaluate(source: str, namespace: dict[str, Any]) -> Any:
    """The function that the generated text is."""
    return eval(source, namespace)  # noqa: S307 - generated text only, and no builtins


def loop_locals(pairs: Iterable[tuple[str, str]]) -> str:
    """The locals as clauses of a comprehension (`for name in [text]` is an assignment to the interpreter)."""
    return "".join(f" for {name} in [{text}]" for name, text in pairs)
