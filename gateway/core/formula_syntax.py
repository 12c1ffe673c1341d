"""Text of a formula -> Python syntax tree, with every error at its column in the text.

Own tokens first: anything that isn't a number, a name or an operator of the language never reaches
Python's parser. `^` is power and becomes `**` here, since Python would read it as XOR with another
precedence. Columns of tree nodes are mapped back to the text as the user wrote it.
"""

import ast
import keyword
import re
from math import isfinite

MAX_CHARS = 512
MAX_NODES = 64
MAX_INTEGER = 2**53

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<operator>\*\*|//|<=|>=|==|!=|[-+*/^(),<>])",
    re.ASCII,
)
_WORDS = frozenset({"if", "else", "and", "or", "not"})
_NO_OPERATOR = {"**": "write ^ for powers", "//": "there is no //; use /"}


class FormulaError(ValueError):
    """A formula can't be accepted. `column` is the 1-based position in its text (a line break counts as one)."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(f"column {column}: {message}")
        self.message = message
        self.column = column


class Syntax:
    """The parsed tree of one formula; `error` and `count` keep its limits and positions."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise FormulaError(
                f"the formula has {len(text)} characters; at most {MAX_CHARS} are allowed", MAX_CHARS + 1
            )
        self._python, self._columns = _rewrite(text)
        if not self._python:
            raise FormulaError("the formula is empty", 1)
        self._nodes = 0
        self.tree = self._parse()

    def error(self, node: ast.AST, message: str) -> FormulaError:
        """An error at the node's place in the text."""
        return FormulaError(message, self._columns[getattr(node, "col_offset", 0)])

    def count(self, node: ast.AST) -> None:
        """Account for one node. Raises `FormulaError` beyond the limit (which also bounds the depth)."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self.error(node, f"the formula has more than {MAX_NODES} parts")

    def has_parenthesis_between(self, outer: ast.expr, inner: ast.expr) -> bool:
        """Whether `inner` is parenthesised, for an `outer` that is a one-character sign before it."""
        return "(" in self._python[outer.col_offset + 1 : inner.col_offset]

    def _parse(self) -> ast.expr:
        try:
            return ast.parse(self._python, mode="eval").body
        except SyntaxError as error:
            if not error.offset:  # the parser's way to say "at the end"
                raise FormulaError("syntax error: the formula ends too early", self._columns[-1]) from None
            offset = min(error.offset, len(self._columns)) - 1
            raise FormulaError(f"syntax error: {error.msg}", self._columns[offset]) from None
        except (RecursionError, MemoryError):
            raise FormulaError("the formula is nested too deeply", 1) from None


def _rewrite(text: str) -> tuple[str, list[int]]:
    """Python source of the same shape, and for each of its characters (and its end) the column in `text`."""
    pieces: list[str] = []
    columns: list[int] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise FormulaError(f"unexpected character {text[at]!r}", at + 1)
        kind, lexeme = str(match.lastgroup), match.group()
        if kind == "space":
            # A line break inside a formula is only layout; leading space would be an indent.
            python = " " * len(lexeme) if pieces else ""
        else:
            _check_token(kind, lexeme, text[match.end() : match.end() + 1], at + 1)
            python = "**" if lexeme == "^" else lexeme
        pieces.append(python)
        columns.extend([at + 1] * 2 if lexeme == "^" else [at + 1 + i for i in range(len(python))])
        at = match.end()
    columns.append(at + 1)
    return "".join(pieces), columns


def _check_token(kind: str, lexeme: str, following: str, column: int) -> None:
    if kind == "number":
        if following.isalnum() or following in ("_", "."):
            raise FormulaError(f"{lexeme + following!r} is not a number", column)
        if lexeme[0] == "0" and lexeme[1:2].isdigit():
            raise FormulaError("a number has no leading zeros", column)
        if not isfinite(float(lexeme)):
            raise FormulaError("the number is too large", column)
        if lexeme.isdigit() and int(lexeme) > MAX_INTEGER:
            raise FormulaError("the whole number is too large to be exact; write it as 1e20", column)
    elif kind == "name" and keyword.iskeyword(lexeme) and lexeme not in _WORDS:
        raise FormulaError(f"{lexeme!r} is not part of the formula language", column)
    elif lexeme in _NO_OPERATOR:
        raise FormulaError(_NO_OPERATOR[lexeme], column)
