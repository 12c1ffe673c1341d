"""A rank made of raw sockets: says what the test tells it to say, byte by byte, and no more.

Also runs as a process (`python -m tests.support.raw_engine`), for tests that kill it.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

TIMEOUT_S = 10.0


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes):
    return msgspec.msgpack.decode(data)


async def until(condition: Callable[[], bool], what: str = "condition", timeout_s: float = TIMEOUT_S) -> None:
    """Let the loop run until `condition()`; fails after a time that no healthy run comes near."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        await asyncio.sleep(0.002)


def ready_response(family: str, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "max_model_len": 4096,
        "num_gpu_blocks": 100,
        "vllm_version": "tokenspeed-0.1.1" if family == "tokenspeed" else "0.32.0",
        "prefix_granularity" if family == "tokenspeed" else "block_size": 16,
        "dtype": "bfloat16",
        "data_parallel_size": 2,
        "max_num_seqs": 8,
        "some_later_key": {"nested": [1, 2]},
    }
    return pack(fields | changes)


def batch(family: str, rows: Sequence[tuple[str, list[int], str]], *, index: int = 0) -> bytes:
    """One step's output: rows of (id, new tokens, finish reason)."""
    if family == "tokenspeed":
        ids, tokens, finish = ([row[column] for row in rows] for column in range(3))
        counts = [len(row[1]) for row in rows]
        zeros, empty = [0] * len(rows), [[] for _ in rows]
        return pack(
            ["BatchTokenIDOutSlim", ids, tokens, finish, zeros, counts, zeros, empty, empty, index, 1, 0, 1, 10]
        )
    codes = {"": None, "stop": 0, "length": 1, "abort": 2, "error": 3}
    outputs = [
        [
            wire_id,
            tokens,
            None,
            None,
            None,
            codes[reason],
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            0,
            None,
            None,
            None,
            None,
        ]
        for wire_id, tokens, reason in rows
    ]
    return pack([index, outputs, None, 2.5, None, None, None, None, None])


class RawEngine:
    """One engine rank. Every step of its life is a method; `join` does them in the family's order."""

    def __init__(
        self, handshake: str, index: int = 0, family: str = "tokenspeed", *, receive_hwm: int = 1000, proxy: str = ""
    ) -> None:
        self.family = family
        self.index = index
        self.identity = index.to_bytes(2, "little")
        self.context = zmq.Context()
        self.context.set(zmq.BLOCKY, False)
        self.handshake_address = handshake
        self.receive_hwm = receive_hwm
        self.proxy = proxy
        self.handshake = self.dial(handshake, zmq.DEALER)
        self.input: zmq.Socket[bytes] | None = None
        self.output: zmq.Socket[bytes] | None = None
        self.reports: zmq.Socket[bytes] | None = None
        self.subscriptions: list[zmq.Socket[bytes]] = []
        self.addresses: tuple[str, str] | None = None
        self.coordinator: tuple[str, str] | None = None
        self.parallel_config: dict[str, object] = {}

    def dial(self, address: str, kind: int, identity: bytes | None = None) -> "zmq.Socket[bytes]":
        """An empty identity lets the ROUTER make one up."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if self.proxy:
            socket.setsockopt_string(zmq.SOCKS_PROXY, self.proxy)
        if kind == zmq.DEALER:
            if identity != b"":
                socket.setsockopt(zmq.IDENTITY, identity or self.identity)
            socket.setsockopt(zmq.RCVHWM, self.receive_hwm)
        else:
            socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
        return socket

    def hello(self) -> None:
        self.handshake.send(pack({"status": "HELLO", "local": True, "headless": True, "parallel_config_hash": None}))

    def ready(self) -> None:
        self.handshake.send(pack({"status": "READY", "local": True, "headless": True, "parallel_config_hash": None}))

    async def init(self) -> tuple[str, str]:
        """Wait for INIT; the addresses for requests and batches."""
        message = unpack((await self.receive(self.handshake))[-1])
        self.parallel_config = message["parallel_config"]
        addresses = message["addresses"]
        if addresses["coordinator_input"] is not None:
            self.coordinator = (addresses["coordinator_input"], addresses["coordinator_output"])
        self.addresses = (addresses["inputs"][0], addresses["outputs"][0])
        return self.addresses

    def connect_input(self) -> None:
        assert self.addresses is not None
        self.input = self.dial(self.addresses[0], zmq.DEALER)

    def subscribe(self) -> "zmq.Socket[bytes]":
        """Ask the coordinator for what it publishes; each call is another connection."""
        assert self.coordinator is not None
        socket = self.dial(self.coordinator[0], zmq.XSUB)
        self.subscriptions.append(socket)
        socket.send(b"\x01")
        return socket

    def report(self, running: int, waiting: int, kv_usage: float = 0.0, **more: object) -> None:
        """Push a load to the coordinator."""
        stats = {"num_running_reqs": running, "num_waiting_reqs": waiting, "kv_cache_usage": kv_usage}
        self.push_report(pack([self.index, [], stats | more, 2.5, None, None, None, None, None]))

    def report_wave(self, *, complete: int | None = None, start: int | None = None) -> None:
        """Push wave control to the coordinator."""
        self.push_report(pack([self.index, [], None, 2.5, None, None, complete, start, None]))

    def push_report(self, *frames: bytes) -> None:
        if self.reports is None:
            assert self.coordinator is not None
            self.reports = self.dial(self.coordinator[1], zmq.PUSH)
        self.reports.send_multipart(frames)

    def register(self, payload: bytes | None = None) -> None:
        if self.input is None:
            self.connect_input()
        assert self.input is not None
        self.input.send(payload if payload is not None else ready_response(self.family))

    def connect_output(self) -> None:
        assert self.addresses is not None
        self.output = self.dial(self.addresses[1], zmq.PUSH)

    async def join(self, registration: bytes | None = None) -> None:
        """TokenSpeed says READY before it registers, vLLM after."""
        self.hello()
        await self.init()
        if self.family == "tokenspeed":
            self.ready()
            self.register(registration)
        else:
            self.register(registration)
            self.ready()
        self.connect_output()

    async def receive(self, socket: "zmq.Socket[bytes] | None" = None) -> list[bytes]:
        source = socket if socket is not None else self.input
        assert source is not None
        await until(lambda: bool(source.getsockopt(zmq.EVENTS) & zmq.POLLIN), "a message at the engine")
        return source.recv_multipart(zmq.NOBLOCK)

    def received(self) -> list[list[bytes]]:
        """Everything that is there now."""
        assert self.input is not None
        messages = []
        while self.input.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            messages.append(self.input.recv_multipart(zmq.NOBLOCK))
        return messages

    def push(self, *frames: bytes) -> None:
        assert self.output is not None
        self.output.send_multipart(frames)

    def push_rows(self, rows: Sequence[tuple[str, list[int], str]], *, index: int | None = None) -> None:
        self.push(batch(self.family, rows, index=self.index if index is None else index))

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets, what was pushed gets `linger_ms` to leave."""
        self.context.destroy(linger=linger_ms)


def _main(handshake: str, family: str, rows: int) -> None:
    """Join, answer the first request with `rows` one-row batches, and die of SIGKILL."""

    async def live() -> None:
        engine = RawEngine(handshake, 0, family)
        await engine.join()
        await engine.receive()
        for number in range(rows):
            engine.push_rows([(f"row-{number}", [number], "")])
        await asyncio.sleep(0.3)  # libzmq's thread hands the rows to the kernel
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(live())


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
