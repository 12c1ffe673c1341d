"""`python -m tests.conformance.floods`: what each flood costs the server, and what it costs everybody else.

The attacker connects again whenever it is ended, as fast as it can, for some seconds. Printed are CPU seconds of the
server per second of attack, its memory, and how long the calls of an honest client took meanwhile.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from resource import getpagesize

import grpc

from tests.conformance import service
from tests.conformance.flood_kinds import FLOODS, LIMITS, Flood, attack
from tests.conformance.service import SERVICE, Request

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).parents[2]


class Attacked:
    """A server in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process = process
        self.address = address

    @property
    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * getpagesize() / 1e6

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextlib.contextmanager
def attacked(**limits: float) -> Iterator[Attacked]:
    """The small service table behind the limits that the floods are made for. It ends with the block."""
    command = [sys.executable, "-m", "tests.conformance.service", json.dumps(LIMITS | limits)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the server did not start"
        yield Attacked(process, address)
        # Closing its standard input ends it.


class Honest:
    """A client in turns with the server on one stream, on a connection of its own."""

    def __init__(self, address: str) -> None:
        self.waits_s: list[float] = []
        self._address = address
        self._is_done = False

    async def talk(self) -> None:
        """Until `stop`. Raises when its call does not go well."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            method = channel.stream_stream(
                f"/{SERVICE}/FullDuplexCall",
                request_serializer=service.encode,
                response_deserializer=service.decode_reply,
            )
            call = method()
            while not self._is_done:
                began_at = time.perf_counter()
                await call.write(Request([10], b"x"))
                reply = await call.read()
                self.waits_s.append(time.perf_counter() - began_at)
                assert (len(reply.body), reply.received) == (10, len(self.waits_s))
                await asyncio.sleep(0.005)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    def stop(self) -> None:
        self._is_done = True


async def measure(flood: Flood, seconds: float) -> str:
    """One line of the table."""
    with attacked() as server:
        honest = Honest(server.address)
        talking = asyncio.ensure_future(honest.talk())
        await asyncio.sleep(0.5)
        start = len(honest.waits_s)
        cpu_at, began_at, ends, frames, rss_mb = server.cpu_s, time.monotonic(), 0, 0, server.rss_mb
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    _, sent = await attack(flood, server.address, seconds + 1)
                    ends, frames, rss_mb = ends + 1, frames + sent, max(rss_mb, server.rss_mb)
        took_s, cpu_s = time.monotonic() - began_at, server.cpu_s - cpu_at
        honest.stop()
        await talking
    waits_ms = sorted(wait_s * 1e3 for wait_s in honest.waits_s[start:])
    p50, p99 = (waits_ms[int(len(waits_ms) * share)] for share in (0.5, 0.99))
    return f"{flood.name:34} {cpu_s / took_s:7.2f} {rss_mb:8.1f} {ends:8} {frames:9} {p50:8.1f} {p99:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.floods", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each flood")
    parser.add_argument("--only", default="", help="floods with this in their name")
    options = parser.parse_args()
    sys.stdout.write(
        f"{'flood':34} {'CPU s/s':>7} {'RSS MB':>8} {'ended':>8} {'frames':>9} {'p50 ms':>8} {'p99 ms':>8}\n"
    )
    for flood in FLOODS:
        if options.only in flood.name:
            sys.stdout.write(f"{asyncio.run(measure(flood, options.seconds))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
