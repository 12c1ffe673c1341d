"""How the driver passes on what the core lists: item by item, or ordinary ones by something faster."""

from collections.abc import Callable
from typing import Protocol

from gateway.core.request import Request, Sequence

Item = Sequence | Request


class FlushItems(Protocol):
    """Flushes sequences that it knows how to, and calls `other` with every other item; in order.

    What is raised on the way to one stream is told to `broken` with its sequence, and does not concern the others.
    """

    def __call__(
        self,
        items: list[Item],
        other: Callable[[Item], None],
        broken: Callable[[Sequence, Exception], None],
        /,
    ) -> None:
        """Called with a list of its own."""
        ...


def flush_each(
    items: list[Item],
    other: Callable[[Item], None],
    broken: Callable[[Sequence, Exception], None],  # noqa: ARG001 - `other` sees to its own
    /,
) -> None:
    """The plain way: no item is known."""
    for item in items:
        other(item)
