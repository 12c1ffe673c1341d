"""The fast listener without a network: microseconds and Python calls per request. Run: `python -m tests.bench.bench_h2`.

One connection is fed with requests of one token, some at a time, and its transport takes everything. Handlers with a task
are compared with those that are called directly, and header blocks that repeat with those that don't. The best of
several runs is shown; ratios are what counts.
"""

import asyncio
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import grpc

from gateway.h2.protocol import frames
from gateway.h2.protocol.frames import DATA, END_STREAM
from gateway.h2.protocol.header_blocks import encode_fields
from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from gateway.h2.server.connection import ServerConnection

REQUESTS = 1000
REPEATS = 3
TOKEN = b"0123456789"
BODY = b"\0\0\0\0\x28" + bytes(40)
TRAILING = encode_fields([(b"x-rankgate-rank", b"3")])
HEAD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/t/Generate"),
    (b":authority", b"gateway"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"user-agent", b"grpc-python-asyncio/1.85.3 grpc-c/58.0.0 (linux; chttp2)"),
]
BLOCKS: dict[str, Callable[[int], bytes]] = {
    "one block": lambda _: encode_fields(HEAD),
    "time-outs differ": lambda number: encode_fields([*HEAD, (b"grpc-timeout", b"%du" % (29_000_000 + number))]),
    "ids differ": lambda number: encode_fields([*HEAD, (b"x-request-id", b"r%d" % number)]),
}


class Transport(asyncio.Transport):
    """Takes everything."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: object) -> None:
        pass


class Handlers(grpc.GenericRpcHandler):
    """Answers every call with so many tokens."""

    def __init__(self, tokens: int, *, is_direct: bool) -> None:
        self._tokens = tokens
        self._handler: Any = grpc.unary_stream_rpc_method_handler(self._run)
        if is_direct:
            vars(self._handler)["direct"] = self._direct

    def service(self, _: object) -> Any:
        return self._handler

    def _direct(self, request: bytes, call: Any) -> None:
        for _ in range(self._tokens):
            call.push(TOKEN)
        call.finish(0, "", TRAILING)

    async def _run(self, request: bytes, context: Any) -> None:
        outlet = context.outlet(lambda: None)
        for _ in range(self._tokens):
            outlet.push(TOKEN)
        context.finish(0, "", TRAILING)


async def serve(handlers: Handlers, block: Callable[[int], bytes], together: int, profile: Any = None) -> float:
    """Process time in microseconds per request, so many of them arriving together."""
    server = Server(limits=Limits(), max_message_bytes=1 << 22)
    server.add_generic_rpc_handlers((handlers,))
    await server.start()
    shared = server._shared
    assert shared is not None
    connection = ServerConnection(shared)
    connection.connection_made(Transport())
    settings = frames.settings(((4, 2**31 - 1),)) + frames.SETTINGS_ACK
    connection.data_received(frames.PREFACE + settings + frames.window_update(0, 2**31 - 70_000))
    reads = []
    for first in range(1, 2 * REQUESTS, 2 * together):
        numbers = range(first, first + 2 * together, 2)
        heads = [frames.headers(number, block(number), is_end=False) for number in numbers]
        reads.append(b"".join(heads + [frames.frame(DATA, END_STREAM, number, BODY) for number in numbers]))
    streams = connection.http.streams
    begin = time.process_time()
    if profile is not None:
        profile.enable()
    for data in reads:
        connection.data_received(data)
        while streams or connection.is_scheduled:  # noqa: ASYNC110 - a turn is what is measured
            await asyncio.sleep(0)
    if profile is not None:
        profile.disable()
    spent = time.process_time() - begin
    connection.connection_lost(None)
    await server.stop(None)
    return spent / REQUESTS * 1e6


def calls(handlers: Handlers, together: int) -> float:
    """Python functions of the listener called per request."""
    profile = cProfile.Profile()
    asyncio.run(serve(handlers, BLOCKS["time-outs differ"], together, profile))
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    count: int = sum(found[1] for where, found in stats.items() if "gateway/h2/" in where[0])
    return count / REQUESTS


def main() -> None:
    direct, task = Handlers(1, is_direct=True), Handlers(1, is_direct=False)
    for together in (1, 8):
        print(f"{together} at a time: µs per request with a task, direct, ratio")
        for name, block in BLOCKS.items():
            pairs = [
                [asyncio.run(serve(handlers, block, together)) for handlers in (task, direct)] for _ in range(REPEATS)
            ]
            slow, fast = (min(times) for times in zip(*pairs, strict=True))
            print(f"  {name:18} {slow:8.1f} {fast:8.1f} {slow / fast:8.2f}", flush=True)
        print(f"  Python calls       {calls(task, together):8.1f} {calls(direct, together):8.1f}")
    per_token = (calls(Handlers(17, is_direct=True), 8) - calls(direct, 8)) / 16
    print(f"Python calls per further token {per_token:.2f}")


if __name__ == "__main__":
    main()
