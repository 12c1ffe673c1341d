"""What a service manager is told: systemd's notification protocol (sd_notify(3)), over a datagram socket.

Without `NOTIFY_SOCKET` in the environment nothing is sent. What can't be sent is dropped: the service manager is told
again at the next change, and a gateway must not wait for it.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_US = 1_000_000


class ServiceManager:
    """Says how the process is. `watchdog_interval_s`: how often it must say that it lives; None: not at all."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.watchdog_interval_s = _watchdog_interval_s(environment)
        name = environment.get("NOTIFY_SOCKET", "")
        # A name that starts with @ is in the abstract namespace, which a NUL stands for.
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        self._socket: socket.socket | None = None
        if name.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        """Everything is bound; after `reloading`: the reload is over."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading the configuration")

    def stopping(self, status: str) -> None:
        """The process begins to stop."""
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for people."""
        self._send(f"STATUS={status}")

    async def keep_alive(self) -> None:
        """Say at half of the interval that the event loop turns, until cancelled."""
        interval_s = self.watchdog_interval_s
        while interval_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(interval_s / 2)

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)


def _watchdog_interval_s(environment: Mapping[str, str]) -> float | None:
    """None without a watchdog, or where it is another process's."""
    text, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not text.isascii() or not text.isdigit() or int(text) < 1 or pid not in ("", str(os.getpid())):
        return None
    return int(text) / _US
