"""Connections for `bench_connections`, as processes of their own.

`python -m tests.bench.connection_client ADDRESS --idle 4700 --streams 300` opens plain HTTP/2 connections that do nothing
and real channels with an open GenerateMany stream each, prints `OPEN {…}` when all are there, keeps them until its input
ends, and prints `CLOSED {…}`: how many the gateway had closed by then.

`--slow BYTES_PER_S` instead is one Generate call whose window opens by so many bytes a second; it prints `ENDED {…}`.
"""

import argparse
import asyncio
import json
import resource
import sys
import time

import grpc

from gateway.v1 import gateway_pb2
from tests.bench.client import GENERATE, MANY
from tests.support.raw_h2 import DATA, END_STREAM, GREETING, HEADERS, RST_STREAM, SETTINGS_ACK, RawClient

AT_ONCE = 200


class Idle(asyncio.Protocol):
    """Answers the server's SETTINGS and then says nothing."""

    def __init__(self, run):
        self.run = run
        self.is_open = False

    def connection_made(self, transport):
        self.transport = transport
        transport.write(GREETING)

    def data_received(self, data):
        if not self.is_open:
            self.is_open = True
            self.transport.write(SETTINGS_ACK)
            self.run.open += 1

    def connection_lost(self, _):
        if self.is_open:
            self.run.open -= 1
        else:
            self.run.refused += 1


class Run:
    def __init__(self):
        self.open = self.refused = self.streams = 0


async def open_idle(run, host, port, count):
    loop = asyncio.get_running_loop()
    transports = []
    for at in range(0, count, AT_ONCE):
        made = (loop.create_connection(lambda: Idle(run), host, port) for _ in range(min(AT_ONCE, count - at)))
        transports += [transport for transport, _ in await asyncio.gather(*made)]
    return transports


async def open_streams(run, address, count):
    """Real channels, each on a connection of its own; a stream is there when its headers have come."""

    async def stream(channel):
        call = channel.stream_stream(MANY)()
        await call.initial_metadata()
        run.streams += 1
        return call

    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(count)
    ]
    return channels, [await stream(channel) for channel in channels]


async def hold(options):
    host, _, port = options.address.rpartition(":")
    run, began_at = Run(), time.monotonic()
    transports = await open_idle(run, host, int(port), options.idle)
    channels, calls = await open_streams(run, options.address, options.streams)
    while run.open + run.refused < options.idle:  # noqa: ASYNC110 - counted in the callbacks of all of them
        await asyncio.sleep(0.01)
    say(
        "OPEN",
        {"idle": run.open, "refused": run.refused, "streams": run.streams, "took_s": time.monotonic() - began_at},
    )
    await asyncio.to_thread(sys.stdin.read)
    say("CLOSED", {"lost": options.idle - run.refused - run.open, "ended": sum(call.done() for call in calls)})
    for transport in transports:
        transport.abort()
    for call in calls:
        call.cancel()
    await asyncio.gather(*(channel.close() for channel in channels))


async def read_slowly(options):
    """The window opens by some bytes a second for so long; then it is opened wide, to read how the call ended."""
    client = await RawClient.connect(options.address, window_bytes=64)
    assert await client.settled()
    sampling = gateway_pb2.Sampling(max_tokens=15_000, ignore_eos=True)
    request = gateway_pb2.GenerateRequest(request_id="slow", prompt_token_ids=[1, 2, 3], sampling=sampling)
    client.call(1, GENERATE, request.SerializeToString())
    began_at, report = time.monotonic(), {"data_bytes": 0, "seconds": 0.0, "trailers": ""}

    async def widen():
        while True:
            await asyncio.sleep(1.0)
            is_over = time.monotonic() - began_at > options.seconds
            client.widen(1, 1 << 20 if is_over else options.slow)
            if is_over:
                return

    widening = asyncio.create_task(widen())
    while (found := await client.next_frame()) is not None:
        kind, flags, _, payload = found
        if kind == DATA:
            report["data_bytes"] += len(payload)
        if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            report["trailers"] = payload.decode("latin-1")
            break
    widening.cancel()
    report["seconds"] = time.monotonic() - began_at
    say("ENDED", report)
    await client.close()


def say(word, facts):
    print(word, json.dumps(facts), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(read_slowly(options) if options.slow else hold(options))
