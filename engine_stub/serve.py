"""`engine-stub serve`: a group of ranks as a process."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from engine_stub.config import Protocol, StubConfig
from engine_stub.control import ControlServer
from engine_stub.group import StubGroup
from engine_stub.wire.handshake import HandshakeError

RECORD_LIMIT = 16
"""Prompts remembered per rank: nobody asks a process for them."""
GC_THRESHOLD = 100_000

LOG = logging.getLogger("engine_stub")
_PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({})))


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says beside the configuration."""

    protocol: Protocol
    handshake: str
    ranks: int
    start_index: int
    backend: str
    control: str | None


class JsonLines(logging.Formatter):
    """One JSON object per record: time (Unix s), level, event, and what `extra` brought."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line = {"ts": round(time.time(), 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= {key: value for key, value in vars(record).items() if key not in _PLAIN_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def run(options: ServeOptions, config: StubConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Raises BackendError, ValueError.

    0: stopped; 1: no handshake, or the gateway speaks another protocol.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOG.handlers = [handler]
    LOG.setLevel(logging.INFO)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(options, config))


async def _serve(options: ServeOptions, config: StubConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    group = StubGroup(
        options.protocol,
        options.handshake,
        ranks=options.ranks,
        config=config,
        start_index=options.start_index,
        backend=options.backend,
        record_limit=RECORD_LIMIT,
    )
    async with group, _control(group, options.control):
        LOG.info("dialling", extra={"handshake": options.handshake, "ranks": options.ranks})
        try:
            if await _unless(stop, group.ready(timeout_s=None)):
                LOG.info("serving", extra={"ranks": options.ranks, "protocol": options.protocol})
                gc.collect()
                gc.freeze()
                gc.set_threshold(GC_THRESHOLD)
                if await _unless(stop, group.misfit.wait()):
                    return 1  # logged by the rank, as is what follows
        except HandshakeError:
            return 1
        LOG.info("stopping", extra={"live": sum(len(rank.live_ids) for rank in group.ranks)})
        await group.shut_down()
    return 0


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do `work` unless `stop` comes first; whether it was done."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


@asynccontextmanager
async def _control(group: StubGroup, address: str | None) -> AsyncIterator[None]:
    """The control socket while the group lives, if there is to be one."""
    if address is None:
        yield
        return
    async with ControlServer(group, address) as server:
        LOG.info("control", extra={"address": server.address})
        task = asyncio.get_running_loop().create_task(server.run(), name="control")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """Uvloop's loop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - optional on some platforms
    except ImportError:
        return None
    return uvloop.Loop


def _raise_file_limit() -> None:
    """Every rank has three sockets, each with descriptors of its own."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
