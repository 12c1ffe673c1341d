"""Lists with one item per rank, whose number may change while the gateway runs."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def resize(column: list[T], size: int, make: Callable[[], T]) -> None:
    """Cut the list to `size` items, or add new ones. In place: others hold the same list."""
    del column[size:]
    column.extend(make() for _ in range(size - len(column)))
