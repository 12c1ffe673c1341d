"""`python -m tests.fuzz.h2_frames`: millions of HTTP/2 frames for the listener's connections, a few of them damaged.

Conversations go on until a frame ends them, so that damage meets every state. The whole of the server is under test but
its sockets: frames in, handlers run, frames out. Counted are the frames that a connection took while it was open. The
same seed gives the same frames; a failure is printed with its block, which `--block` runs again alone.
"""

import argparse
import asyncio
import faulthandler
import multiprocessing
import sys
import time
from typing import Any, NamedTuple

import grpc

from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from gateway.h2.server.connection import ServerConnection
from tests.conformance.service import Direct
from tests.conformance.wire import GOAWAY
from tests.conformance.wired import Transport
from tests.fuzz.h2_source import CHUNK_FRAMES, Source, templates
from tests.fuzz.runner import rss_mb

BLOCK_FRAMES = 20_000
MAX_STREAMS = 64
HANG_S = 60.0
MAX_GROWTH_MB = 32.0
_OUT_PER_FRAME = 400
"""Bytes that a frame may bring out: nothing here asks for more than its own size and a status."""
_GENEROUS = {"chores_burst": 1e12, "resets_burst": 1e12, "window_updates_burst": 1e12, "min_client_ping_s": 0.0}
_LIMITS = {"max_streams": MAX_STREAMS, "max_request_bytes": 4096, "max_header_list_bytes": 2048}


class Tally(NamedTuple):
    frames: int
    connections: int
    failures: list[str]
    rss_mb: list[float]
    cpu_s: float


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Cheap answers of each kind."""

    def __init__(self) -> None:
        unary, out = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        both = grpc.stream_stream_rpc_method_handler
        made = {
            "Echo": unary(_echo),
            "Push": out(_push),
            "Both": both(_both),
            "Wait": out(_wait),
            "Refuse": unary(_refuse),
        }
        made["Direct"] = Direct(out(_push), _push_now)
        self._made = {f"/t/{name}": handler for name, handler in made.items()}

    def service(self, details: Any) -> Any:
        return self._made.get(details.method)


async def _echo(request: bytes, _: Any) -> bytes:
    return request


async def _push(request: bytes, context: Any) -> None:
    outlet = context.outlet(lambda: None)
    for _ in range(3):
        outlet.push(request[:20])


def _push_now(message: bytes, call: Any) -> None:
    for _ in range(3):
        call.push(message[:20])
    call.finish(0)


async def _both(requests: Any, context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def _wait(_: bytes, __: Any) -> None:
    await asyncio.Event().wait()


async def _refuse(_: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, "no")


class _Quiet:
    """In place of the log of clients' errors."""

    def note(self, *_: object) -> None:
        pass


class Conversations:
    """Connections one after the other, as long as each lives."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.frames = self.connections = 0
        self.failures: list[str] = []
        asyncio.get_running_loop().set_exception_handler(self._note)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context['message']}: {context.get('exception')!r}")

    async def run(self, frames: int) -> None:
        """Until so many frames were taken."""
        servers = [await self._server(more) for more in ({}, _GENEROUS, _GENEROUS, _GENEROUS)]
        while self.frames < frames and len(self.failures) < 5:
            await self._converse(servers[self.connections % len(servers)], frames)
        for server in servers:
            await server.stop(None)

    async def _server(self, more: dict[str, float]) -> Server:
        server = Server(limits=Limits(**_LIMITS, **more), max_message_bytes=65_536, faults=_Quiet())  # type: ignore[arg-type]
        server.add_generic_rpc_handlers((Handlers(),))
        await server.start()
        return server

    async def _converse(self, server: Server, frames: int) -> None:
        assert server._shared is not None
        connection, transport = ServerConnection(server._shared), Transport()
        connection.connection_made(transport)
        source, before = self._source, self.frames
        data, count = source.opening()
        sent = [data]
        try:
            while not transport.is_closed and self.frames < frames:
                for piece in source.cuts(data):
                    connection.data_received(piece)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert len(connection.http.streams) <= MAX_STREAMS
                self.frames += 1 if transport.is_closed else count
                data, count = source.chunk()
                sent.append(data)
            check_output(transport.take(), self.frames - before, is_closed=transport.is_closed)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the find
            self.failures.append(f"{type(error).__name__}: {error} after {b''.join(sent).hex()[-8000:]}")
        self.connections += 1
        connection.connection_lost(None)


def check_output(data: bytes, frames: int, *, is_closed: bool) -> None:
    """Whole frames, not many more than were asked for, and a GOAWAY before the end."""
    assert len(data) <= _OUT_PER_FRAME * (frames + CHUNK_FRAMES), f"{len(data)} bytes for {frames} frames"
    at, kind = 0, -1
    while at < len(data):
        kind = data[at + 3]
        at += 9 + int.from_bytes(data[at : at + 3])
    assert at == len(data), "the last frame is cut short"
    assert not is_closed or kind == GOAWAY, f"closed after a frame of type {kind}"


def work(blocks: list[int], frames: int, seed: str) -> Tally:
    """Blocks in this process, of so many frames each."""
    known, cpu_at = templates(), time.process_time()
    total, connections, failures, memory = 0, 0, [], []
    for number, block in enumerate(blocks):
        faulthandler.dump_traceback_later(HANG_S, exit=True)

        async def run(block: int = block) -> Conversations:
            made = Conversations(Source(f"{seed}/h2/{block}", known))
            await made.run(frames)
            return made

        made = asyncio.run(run())
        total, connections = total + made.frames, connections + made.connections
        failures += [f"block {block}: {failure}" for failure in made.failures]
        if number % max(1, len(blocks) // 10) == 0:
            memory.append(round(rss_mb(), 1))
    faulthandler.cancel_dump_traceback_later()
    return Tally(total, connections, failures[:5], memory, time.process_time() - cpu_at)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.h2_frames", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", default="1", help="any text")
    parser.add_argument("--block", type=int, help="this one alone")
    options = parser.parse_args()
    count = -(-options.frames // BLOCK_FRAMES)
    blocks = list(range(count)) if options.block is None else [options.block]
    size = min(options.frames, BLOCK_FRAMES)
    began_at = time.monotonic()
    shares = [(share, size, options.seed) for job in range(options.jobs) if (share := blocks[job :: options.jobs])]
    with multiprocessing.get_context("spawn").Pool(len(shares)) as pool:
        tallies = pool.starmap(work, shares, chunksize=1)
    failures = [failure for tally in tallies for failure in tally.failures]
    frames, cpu_s = sum(tally.frames for tally in tallies), sum(tally.cpu_s for tally in tallies)
    growth = max((tally.rss_mb[-1] - min(tally.rss_mb[1:3] or [tally.rss_mb[-1]]) for tally in tallies), default=0.0)
    sys.stdout.write(
        f"{frames} HTTP/2 frames on {sum(tally.connections for tally in tallies)} connections in "
        f"{time.monotonic() - began_at:.1f} s, {cpu_s / max(1, frames) * 1e6:.1f} us of CPU each, {len(failures)} failures, "
        f"memory {[tally.rss_mb for tally in tallies]} MB\n"
    )
    for failure in failures:
        sys.stdout.write(f"FAILED {failure}\n")
    return 1 if failures or growth > MAX_GROWTH_MB else 0


if __name__ == "__main__":
    sys.exit(main())
