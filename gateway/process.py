"""One gateway as a process: signals, the configuration file, the service manager, the exit code."""

import asyncio
import ctypes
import gc
import resource
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from gateway.app import Gateway
from gateway.config.schema import Config
from gateway.edges import logs
from gateway.edges.grpc_server import ListenError
from gateway.edges.reload import FileWatch, Reloader
from gateway.edges.service_manager import ServiceManager

# malloc.h of glibc
_M_ARENA_MAX = -8
EXIT_OK = 0
EXIT_RUNTIME = 1
_MAX_OPEN_FILES = 65536
# Requests leave no reference cycles, so full collections find little: keep them rare.
_GC_THRESHOLDS = (10_000, 20, 100)


def run(config: Config, config_path: Path, load: Callable[[], Config], identity: object) -> int:
    """Serve a configuration until a signal ends it. Returns the process's exit code.

    `load` reads it again; `identity` is what `file_identity` said of the file before it was read.
    """
    observability = config.observability
    logs.configure(observability.log_level, observability.log_format)
    log = structlog.get_logger("gateway")
    share_one_heap()
    raise_open_files_limit()
    try:
        return run_loop(_serve(config, config_path, load, identity))
    except (OSError, ListenError) as error:
        # An address in use is the operator's to fix: the message is enough, a traceback would hide it.
        log.error("start_failed", error=str(error), config=str(config_path))  # noqa: TRY400
        return EXIT_RUNTIME


async def _serve(config: Config, config_path: Path, load: Callable[[], Config], identity: object) -> int:
    """Run until SIGTERM or SIGINT; a second one stops at once. SIGHUP reloads."""
    manager = ServiceManager()
    gateway = Gateway(config, load, manager)
    reloader = gateway.reloader
    assert reloader is not None
    stop, hurry, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_stop() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    on_change = partial(reloader.reload, "file")
    watch = FileWatch(config_path, identity, lambda: gateway.config.reload.watch_interval_s, on_change)
    await gateway.start()
    settle_memory()
    manager.ready(gateway.status())
    routines = (manager.keep_alive(), watch.run(), _reload_when(reload, reloader))
    tasks = [asyncio.create_task(routine) for routine in routines]
    await stop.wait()
    await gateway.drain(hurry)
    await gateway.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    manager.close()
    return EXIT_OK


async def _reload_when(wanted: asyncio.Event, reloader: Reloader) -> None:
    """Signals that come while a reload is under way ask for one more together."""
    while True:
        await wanted.wait()
        wanted.clear()
        await reloader.reload("SIGHUP")


def settle_memory() -> None:
    """What start-up built lives as long as the process: keep the collector from walking it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def share_one_heap() -> None:
    """Let the threads share one heap, where the C library is glibc.

    Messages are made by libzmq's thread and freed by the loop's: with a heap per thread each keeps the most that it ever
    held, and the process stays at the size of its worst moment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def raise_open_files_limit() -> None:
    """Take the open files that the system allows: every rank and every client connection needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Use uvloop where it is available, asyncio otherwise: same behaviour, about half the CPU per call."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
