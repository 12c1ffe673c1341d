"""Processes on a core of their own, what the kernel counts for them, and their end: always by their own id."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVER_CORE, LOAD_CORE = "0", "1"
START_S, STOP_S = 30.0, 3.0


class PeerError(Exception):
    """Why a peer, or one of its measurements, has no figures."""


def free_port() -> int:
    """A loopback port that nobody has now."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port: int = each.getsockname()[1]
        return port


class Process:
    """A command pinned to `core`, with the end of its log for error messages."""

    def __init__(self, core: str, command: Sequence[object], log: Path, *, speaks: bool = False) -> None:
        self.name, self._log = log.stem, log
        pipe = subprocess.PIPE if speaks else None
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["taskset", "-c", core, *map(str, command)],
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or file,
                stderr=file,
                cwd=ROOT,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def check(self) -> None:
        """Raise PeerError if it has ended."""
        if self._process.poll() is not None:
            raise PeerError(f"{self.name} ended with {self._process.returncode}: {self.said()}")

    def said(self) -> str:
        """The end of its log, in one line."""
        return " ".join(self._log.read_text(errors="replace").split())[-300:]

    def expect(self, word: str, timeout_s: float = START_S) -> None:
        """Wait for this line of its output. Raises PeerError."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], timeout_s)[0]:
            raise PeerError(f"{self.name} did not say {word} within {timeout_s:.0f} s: {self.said()}")
        line = output.readline().decode().strip()
        if line != word:
            raise PeerError(f"{self.name} said {line!r} instead of {word}: {self.said()}")

    def tell(self, line: str) -> None:
        """Write one line to its input and wait for its OK."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} is gone: {self.said()}") from None
        self.expect("OK")

    def wait(self, timeout_s: float) -> None:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        self._process.wait(timeout_s)

    def pause(self) -> None:
        """Hold it and what it started until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for each in tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def stop(self) -> None:
        """End it and what it started."""
        self.resume()
        children = tree(self.pid)[1:]
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)


def own_python(module: str, *arguments: object) -> list[object]:
    """A module of this package with the interpreter that runs this."""
    return [sys.executable, "-m", f"tests.bench.peers.{module}", *arguments]


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    found += tree(int(child))
    return found


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process and its children, to the nanosecond."""
    return sum(_thread_ns(task) for each in tree(pid) for task in _tasks(each)) / 1e9


def rss_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    pages = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _tasks(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def _thread_ns(task: Path) -> int:
    with contextlib.suppress(OSError):
        return int((task / "schedstat").read_text().split()[0])
    return 0


def until_listening(port: int, process: Process, timeout_s: float = START_S) -> None:
    """Wait for a port of `process`. Raises PeerError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.05)
    raise PeerError(f"{process.name} does not listen after {timeout_s:.0f} s: {process.said()}")
