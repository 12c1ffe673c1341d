"""For tests of what is written twice, in C and in Python: whole objects, to be held against each other."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from gateway.native import compiled as _compiled

UNSET = "unset"


def compiled_or_skip() -> Any:
    """For the head of a test module."""
    if _compiled is None:
        pytest.skip("gateway.native was not compiled", allow_module_level=True)
    return _compiled


def slots_of(thing: Any, names: dict[int, str]) -> dict[str, Any]:
    """Every slot of an object. What `names` has (by `id`) is there by its name, so that two worlds compare equal."""
    slots = [slot for cls in type(thing).__mro__ for slot in getattr(cls, "__slots__", ())]
    assert slots, type(thing)
    return {slot: plain(getattr(thing, slot, UNSET), names) for slot in slots}


def plain(value: Any, names: dict[int, str]) -> Any:
    """A copy of the value along with its type: a tuple is no list here, and True not 1."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, list | tuple | array):
        return type(value).__name__, [plain(item, names) for item in value]
    if isinstance(value, dict):
        return "dict", [(plain(key, names), plain(item, names)) for key, item in value.items()]
    return type(value).__name__, bytes(value) if isinstance(value, bytearray) else value


def assert_references_stay(once: Callable[[], object], counts: Callable[[], object]) -> None:
    """Doing it fifty times more leaves as many references as before."""
    for _ in range(3):
        once()
    before = counts()
    for _ in range(50):
        once()
    assert counts() == before
