"""The installed commands as processes: started, waited for with a bound, and ended by their own pids."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine_stub.control_client import ask

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WAIT_S = 40.0
"""No healthy run comes near, not even on a busy host: what is waited for takes milliseconds, a start two seconds."""
POLL_S = 0.02

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Tests seed the global generator, and two runs side by side must not draw the same ports.
_ports = random.SystemRandom()
_given: deque[int] = deque(maxlen=1000)


def free_port() -> int:
    """A loopback port that nobody uses and that was not given lately, below those that outgoing connections get.

    So it is still free when a process that was killed comes back to it.
    """
    lowest = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    for _ in range(200):
        port = _ports.randrange(12_000, max(12_100, lowest))
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.append(port)
        return port
    raise AssertionError("no free port found")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until `condition()` holds. From async tests: `await asyncio.to_thread(wait_until, …)`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(POLL_S)


def environment(**more: str) -> dict[str, str]:
    """This process's, without what could change the commands' behaviour."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RANKGATE_", "GRPC_"))}
    return kept | {"NO_COLOR": "1"} | more


def run(*command: object, timeout_s: float = WAIT_S, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the virtual environment (by name), or any program (by path), to its end."""
    return subprocess.run(
        _arguments(command),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
    )


def _arguments(command: tuple[object, ...]) -> list[str]:
    program, *arguments = map(str, command)
    return [program if "/" in program else str(BIN / program), *arguments]


class Process:
    """A running command in a process group of its own; what it prints goes to files."""

    def __init__(self, directory: Path, name: str, *command: object, **more: str) -> None:
        self.name = name
        self._stdout, self._stderr = directory / f"{name}.out", directory / f"{name}.err"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                _arguments(command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env=environment(**more),
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """Everything on stdout so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def log_path(self) -> Path:
        """The file of stderr."""
        return self._stderr

    @property
    def log(self) -> str:
        """Everything on stderr so far."""
        return self._stderr.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The whole lines of a JSON log so far, or those of one event. A line that is no JSON is an error."""
        whole = self.log.rpartition("\n")[0]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except json.JSONDecodeError as error:
            raise AssertionError(f"{self.name} wrote a line that is no JSON: {error.doc}") from None
        return [line for line in lines if name is None or line["event"] == name]

    def ends(self, count: int, **fields: Any) -> list[dict[str, Any]]:
        """The terminal lines with these fields, of which there are to be so many: a line may come after its answer."""

        def found() -> list[dict[str, Any]]:
            lines = self.events("request_ended")
            return [line for line in lines if all(line[name] == value for name, value in fields.items())]

        wait_until(lambda: len(found()) >= count, f"{count} terminal lines")
        lines = found()
        assert len(lines) == count
        return lines

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """As a terminal does on Ctrl-C: to the process and to what it has started."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s: {self.log[-2000:]}") from None

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def members(self) -> list[int]:
        """The pids of its session: its own while it runs, and those of what it has started and left."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # pid (name) state ppid pgrp session …: the name may hold anything, so look behind it.
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def close(self) -> None:
        """End it, and what it has left behind. Idempotent."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(WAIT_S)


class RankProcess(Process):
    """`engine-stub serve` with a control socket."""

    def __init__(self, directory: Path, name: str, *arguments: object) -> None:
        self.control = f"tcp://127.0.0.1:{free_port()}"
        super().__init__(directory, name, "engine-stub", "serve", "--control", self.control, *arguments)

    def ask(self, op: str, rank: int | None = None, **settings: object) -> list[dict[str, Any]]:
        """One control request; the states of the ranks that it was for."""
        reply = ask(self.control, {"op": op, "rank": rank, "set": settings}, WAIT_S)
        assert reply["ok"], reply
        ranks: list[dict[str, Any]] = reply["ranks"]
        return ranks

    def total(self, field: str) -> int:
        """A counter of the ranks' states, or the length of a list in them, summed."""
        values = [state[field] for state in self.ask("state")]
        return sum(len(value) if isinstance(value, list) else value for value in values)
