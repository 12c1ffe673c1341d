"""The one error of a configuration file, what a rule has to say about it, and how places in it are written."""

import re
from pathlib import Path
from typing import NamedTuple

Loc = tuple[str | int, ...]
"""Path of keys and list indexes from the root of a document; `()` is the root."""


_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SHOWN_CHARACTERS = 60


def show(value: object) -> str:
    """Write a value of the file in a message: on one line, not too long."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def format_loc(loc: Loc) -> str:
    """Write a place as a JSON path: `("groups", 0, "name")` becomes `$.groups[0].name`."""
    parts = ["$"]
    for part in loc:
        if isinstance(part, str) and len(part) <= _SHOWN_CHARACTERS and _PLAIN_KEY.fullmatch(part):
            parts.append(f".{part}")
        else:
            parts.append(f"[{show(part)}]")
    return "".join(parts)


class Problem(NamedTuple):
    """Something that can't work. `offset` points into the text at `loc`; `at_key` at its key."""

    loc: Loc
    message: str
    at_key: bool = False
    offset: int | None = None


class ConfigError(Exception):
    """A file that can't be used, with the place to look at.

    `line` and `column` count characters from 1; both are None where the file could not be read at
    all. `at` is the place as a JSON path, None where the text has no structure yet. `str()` is the
    line that users see: `FILE:LINE:COL: message (at $.path)`.
    """

    def __init__(
        self, path: Path | str, line: int | None, column: int | None, message: str, *, at: str | None = None
    ) -> None:
        super().__init__(path, line, column, message)
        self.path = path
        self.line = line
        self.column = column
        self.message = message
        self.at = at

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}" if self.line is not None else f"{self.path}"
        suffix = f" (at {self.at})" if self.at is not None else ""
        return f"{place}: {self.message}{suffix}"
