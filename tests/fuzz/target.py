"""What a fuzz target is: where its frames come from, how one is made, and what must hold for it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gateway.core.errors import GatewayError
from gateway.edges.grpc_status import to_status
from tests.fuzz.mutator import Frame, Mutator

Check = Callable[[Frame], None]


class Target(NamedTuple):
    """`run` takes a frame and raises when the code under test breaks its promise.

    `corpus` are whole frames to damage; `damage` makes another frame of one of them. `share` is the target's part of a
    run, relative to the others'. `make` builds `run` in the process that needs it.
    """

    name: str
    share: float
    corpus: Callable[[], Sequence[Frame]]
    make: Callable[[], Check]
    damage: Callable[[Mutator, Frame], Frame] = lambda mutator, frame: mutator.frames(frame)


def show(frame: Frame) -> str:
    """A frame for a report, to be put back with `Frame.fromhex`."""
    return "|".join(part.hex() for part in frame)


def unshow(text: str) -> Frame:
    """The frame of a report."""
    return [bytes.fromhex(part) for part in text.split("|")]


def accepts(error: type[Exception] | tuple[type[Exception], ...], call: Callable[..., Any], *args: Any) -> Any:
    """The call's result; None when it raised one of the errors that it declares."""
    try:
        return call(*args)
    except error:
        return None


def damage_bytes(mutator: Mutator, frame: Frame) -> Frame:
    """Changes of bytes only: what is damaged here is no msgpack."""
    return [mutator.raw(frame[0])]


def check_error(error: GatewayError) -> None:
    """What is refused can be told to the caller."""
    status = to_status(error)
    assert len(status.SerializeToString()) < 8 * 1024
    assert status.message


def refusable(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except GatewayError as error:
        check_error(error)
        return None
