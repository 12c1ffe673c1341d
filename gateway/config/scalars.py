"""Unquoted YAML scalars, read so that no two YAML versions could disagree on a number.

Null, true/false, decimal integers and decimal floats mean the same in JSON, YAML 1.1 and YAML 1.2 and
are read as such. Everything else is text, also what only some versions turn into a number or a boolean
(`on`, `12:30`, `010`, `0x1f`, `1_000`): where text is meant it is right, and where a number or boolean
is meant the strict types refuse it, with the advice of `explain_text`.
"""

import math
import re

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_ADVICE = (
    (re.compile(r"(?i:yes|no|on|off)"), "write true or false"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "base 60 is not read as a number; write it in decimal"),
    (re.compile(r"[-+]?0[0-9_]+"), "octal is not read as a number; write it in decimal, without leading zeros"),
    (re.compile(r"[-+]?0[xXbBoO][0-9a-fA-F_]+"), "only decimal is read as a number"),
    (re.compile(r"[-+]?[1-9][0-9]*_[0-9_]*"), "write the number without _"),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), "numbers must be finite"),
    (_INTEGER, "the number does not fit 64 bits"),
    (_FLOAT, "numbers must be finite"),
)  # fmt: skip
_INTEGER_LIMIT = 2**63
_MAX_DIGITS = 20


def read_plain(text: str) -> str | int | float | bool | None:
    """Value of an unquoted scalar."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    # The digit count comes first: int() itself raises beyond 4300 digits.
    if _INTEGER.fullmatch(text) and len(text) <= _MAX_DIGITS and abs(int(text)) < _INTEGER_LIMIT:
        return int(text)
    if _FLOAT.fullmatch(text) and not _INTEGER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def explain_text(text: str) -> str | None:
    """Why an unquoted scalar that was read as text is no number or boolean, and what to write instead."""
    return next((advice for pattern, advice in _ADVICE if pattern.fullmatch(text)), None)
