"""The demo's processes: the installed commands on free loopback ports, and nothing else touched."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

RANKS = 4
VOCAB_SIZE = 32000
MAX_CONTEXT_TOKENS = 16384
_BIN = Path(sys.executable).parent
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class Ports(msgspec.Struct, frozen=True):
    """Free loopback ports, one per listener."""

    grpc: int
    admin: int
    metrics: int
    handshake: int


def free_ports() -> Ports:
    """Four ports that nobody uses right now."""
    sockets = [socket.socket() for _ in range(4)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return Ports(*(each.getsockname()[1] for each in sockets))
    finally:
        for each in sockets:
            each.close()


class Stack:
    """Starts the gateway and the ranks; ends both on leaving, by their own pids."""

    def __init__(self, directory: Path, protocol: str, backend: str) -> None:
        self.ports = free_ports()
        self.directory = directory
        self._protocol = protocol
        self._backend = backend
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        ports = self.ports
        config = {
            "version": 1,
            "listen": {
                "grpc": f"127.0.0.1:{ports.grpc}",
                "admin": f"127.0.0.1:{ports.admin}",
                "metrics": f"127.0.0.1:{ports.metrics}",
            },
            "model": {"name": "demo", "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": VOCAB_SIZE},
            "groups": [
                {
                    "name": "demo",
                    "protocol": self._protocol,
                    "handshake": f"tcp://127.0.0.1:{ports.handshake}",
                    "ranks": RANKS,
                    "min_ready": RANKS,
                }
            ],
            "policy": {"preset": "lmetric", "seed": 1},
        }
        path = self.directory / "gateway.yaml"
        path.write_text(json.dumps(config, indent=2))
        self._start("gateway", [_BIN / "rankgate", "serve", "-c", path])
        self._start(
            "ranks",
            [
                *(_BIN / "engine-stub", "serve", "--protocol", self._protocol, "--ranks", RANKS),
                *("--handshake", f"tcp://127.0.0.1:{ports.handshake}", "--backend", self._backend),
                *("--vocab-size", VOCAB_SIZE),
            ],
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The gateway first: it drains, and the ranks never see it vanish under them.
        for process in self._processes:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Raise with the log's end when a process has died."""
        for process, name in zip(self._processes, ("gateway", "ranks"), strict=False):
            if process.poll() is not None:
                tail = (self.directory / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the {name} process ended with code {process.returncode}:\n{tail}")

    def deadline(self) -> float:
        """When to give up waiting for readiness, on the monotonic clock."""
        return time.monotonic() + _START_TIMEOUT_S

    def _start(self, name: str, command: list[object]) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self._processes.append(process)
