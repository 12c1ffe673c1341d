"""One of the processes, as the supervisor sees it: started, spoken to, waited for."""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from gateway.processes.peer import Handler, Peer, PeerError

START_TIMEOUT_S = 120.0
_MANAGER_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")


class Child:
    """A process with its number. It may be started again once it has ended; `handlers` answer what it asks."""

    def __init__(self, number: int, handlers: Mapping[str, Handler]) -> None:
        self.number = number
        self.is_up = False
        self.restarts = 0
        self.peer: Peer | None = None
        self._handlers = handlers
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs, or ran last."""
        return None if self._process is None else self._process.pid

    async def start(self, begin: Mapping[str, Any]) -> None:
        """Start it with what it has to know. Raises PeerError, saying what it said; it is ending then."""
        mine, its = socket.socketpair()
        with its:
            # A session of its own: what a terminal sends is for the supervisor, which tells the others.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "gateway.processes.worker",
                str(its.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                start_new_session=True,
                env=_environment(),
            )
        self.peer = await Peer.open(mine, self._handlers)
        await self.peer.ask("begin", dict(begin), START_TIMEOUT_S)
        self.is_up = True

    async def ask(self, what: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """See `Peer.ask`."""
        if self.peer is None or not self.is_up:
            raise PeerError(f"{what}: process {self.number} is not up")
        return await self.peer.ask(what, body, timeout_s)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        code = await self._process.wait()
        self.is_up = False
        if self.peer is not None:
            await self.peer.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _environment() -> dict[str, str]:
    """This process's, with its import path, and without what the service manager told this one alone."""
    kept = {name: value for name, value in os.environ.items() if name not in _MANAGER_VARIABLES}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
