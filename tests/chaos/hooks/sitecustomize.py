"""What a test can do to a gateway process from outside: move its wall clock, and ask for its tasks.

Python imports this module at start because its directory is on PYTHONPATH; the gateway itself is the installed command.
Only Python's own `time.time` family is moved; gRPC's C core and libzmq read the system's clocks themselves.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

_CLOCK, _TASKS = os.environ.get("CHAOS_CLOCK"), os.environ.get("CHAOS_TASKS")
_real_time, _real_time_ns = time.time, time.time_ns


class _Clock:
    """The wall clock with an offset."""

    offset_s = 0.0

    @classmethod
    def read(cls) -> float:
        return _real_time() + cls.offset_s

    @classmethod
    def read_ns(cls) -> int:
        return _real_time_ns() + int(cls.offset_s * 1e9)

    @classmethod
    def move(cls, *_: object) -> None:
        """SIGUSR1: take the offset from the file."""
        if _CLOCK is not None:
            cls.offset_s = float(Path(_CLOCK).read_text())


def _list_tasks(*_: Any) -> None:
    """SIGUSR2: write the names of all tasks, whole or not at all."""
    import asyncio

    if _TASKS is None:
        return
    names = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    temporary = Path(f"{_TASKS}.new")
    temporary.write_text(json.dumps(names))
    temporary.replace(_TASKS)


if _CLOCK is not None:
    time.time, time.time_ns = _Clock.read, _Clock.read_ns
    signal.signal(signal.SIGUSR1, _Clock.move)
    signal.signal(signal.SIGUSR2, _list_tasks)
