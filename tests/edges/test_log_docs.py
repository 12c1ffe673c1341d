"""docs/logs.md lists every event that the gateway logs, with its level, and every field of `request_ended`."""

import ast
import re
from pathlib import Path

import pytest

from tests.edges.test_logs import FIELDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/logs.md").read_text(encoding="utf-8")
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
WRITE = "write"
"""What the code calls a logging method that it chose by the case: `info` or `warning`."""
ROWS = [line.split("|")[1:] for line in PAGE.splitlines() if line.startswith("| `")]


def is_log(function):
    """Whether a call of it writes a line: `….log.info`, `_log.warning`, `write`."""
    if isinstance(function, ast.Attribute):
        return function.attr in LEVELS and ast.unparse(function.value).endswith("log")
    return isinstance(function, ast.Name) and function.id == WRITE


def logged_events():
    """Pairs of an event's name and the level it is logged at ("write": it depends)."""
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
        refusals = [call.args[0] for call in calls if ast.unparse(call.func) == "self._reject"]
        for call in calls:
            name = call.args[0]
            if not is_log(call.func):
                continue
            method = call.func.attr if isinstance(call.func, ast.Attribute) else WRITE
            if isinstance(name, ast.Constant):
                yield name.value, method
            elif isinstance(name, ast.JoinedStr):
                prefix = name.values[0].value
                yield from ((prefix + outcome.value, method) for outcome in refusals)


EVENTS = sorted(set(logged_events()))


def listed():
    """Each event of the tables with the text of its level."""
    return {
        name: level
        for names, level, *more in ROWS
        if len(more) > 1  # the table of fields has no level
        for name in re.findall(r"`(\w+)`", names)
    }


@pytest.mark.parametrize(("event", "method"), EVENTS)
def test_every_event_is_listed_with_its_level(event, method):
    levels = {"info", "warning"} if method == WRITE else {LEVELS[method]}
    assert set(re.findall(r"debug|info|warning|error", listed()[event])) == levels


def test_nothing_else_is_listed():
    assert {name for name, _ in EVENTS} == set(listed())


def test_every_field_of_the_terminal_line_is_listed():
    fields = {name for names, *more in ROWS if len(more) == 2 for name in re.findall(r"`(\w+)`", names)}
    assert fields == FIELDS - {"timestamp", "level", "event", "logger"} | {"tenant", "cached", "batch"}
