"""The other end of the control socket."""

from typing import Any

import msgspec
import zmq


class ControlUnreachable(Exception):  # noqa: N818 - what happened, not the name of a kind
    """No answer in time."""


def ask(address: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send one request and wait for its reply; raises `ControlUnreachable`."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(msgspec.json.encode(request))
        if not socket.poll(int(timeout_s * 1000)):
            raise ControlUnreachable(f"no answer from {address} within {timeout_s:g} s: is `serve --control` running?")
        reply: dict[str, Any] = msgspec.json.decode(socket.recv())
        return reply
