"""One of several processes: a gateway that does as its supervisor says. `python -m gateway.processes.worker FD`.

Signals are the supervisor's business, which tells its processes; they themselves ignore them, so that a terminal or a
service manager that signals all of them at once ends nobody in a hurry. A supervisor that is gone ends them.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gateway import process
from gateway.app import Gateway, Seat
from gateway.config.changes import refusals
from gateway.config.errors import ConfigError
from gateway.config.schema import Config
from gateway.edges import logs
from gateway.edges.grpc_server import ListenError
from gateway.edges.reload import Outcome, Reloader
from gateway.edges.side_thread import in_side_thread
from gateway.h2.server import listener
from gateway.processes.admin import AdminRelay
from gateway.processes.peer import Peer, PeerError
from gateway.processes.plan import share_of, shares_ranks
from gateway.processes.source import Source

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has to know. `text` is the configuration in force, `grpc` the address that all share."""

    process: int
    source: Source
    text: str
    directory: str
    grpc: str


class Worker:
    """What the supervisor can ask. `run` ends when the gateway has stopped."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.handlers = {
            "begin": self._begin,
            "ping": self._ping,
            "metrics": self._metrics,
            "check": self._check,
            "reload": self._reload,
            "apply": self._apply,
            "stop": self._stop,
        }
        self._text = ""
        self._problem = ""
        self._begin_with: Begin | None = None
        self._gateway: Gateway | None = None
        self._relay: AdminRelay | None = None
        self._registry = CollectorRegistry()

    async def run(self, peer: Peer) -> int:
        """Serve until told to stop. Returns the exit code."""
        begin = self._begin_with = await self.begun
        self._text = begin.text
        config = self._share(begin.text)
        logs.configure(config.observability.log_level, config.observability.log_format)
        log = structlog.get_logger("gateway")
        process.share_one_heap()
        process.raise_open_files_limit()
        self._relay = AdminRelay(peer, begin.process)
        seat = Seat(
            process=begin.process,
            client_index=begin.process if shares_ranks(config) else 0,
            make_reloader=partial(_AskingReloader, peer),
            make_servers=self._relay.servers,
        )
        gateway = self._gateway = Gateway(config, self._load, seat=seat)
        listener.share_port(int(config.listen.grpc.rpartition(":")[2]))
        try:
            await gateway.start()
        except (OSError, ListenError) as error:
            log.error("start_failed", error=str(error), process=begin.process)  # noqa: TRY400 - as in gateway.process
            self.started.set_exception(PeerError(str(error)))
            await asyncio.sleep(0.1)  # for the answer to leave
            return process.EXIT_RUNTIME
        process.settle_memory()
        self._registry.register(gateway.metrics)
        ProcessCollector(registry=self._registry)
        self.started.set_result(None)
        await self.stop.wait()
        await gateway.drain(self.hurry)
        await gateway.stop()
        return process.EXIT_OK

    def _load(self) -> Config:
        if self._problem:
            raise _ReadElsewhereError(self._problem)
        return self._share(self._text)

    def _share(self, text: str) -> Config:
        begin = self._begin_with
        assert begin is not None
        config = begin.source.parse(text)
        listen = msgspec.structs.replace(config.listen, grpc=begin.grpc)
        config = msgspec.structs.replace(config, listen=listen)
        return share_of(config, begin.process, Path(begin.directory))

    async def _begin(self, body: Any) -> None:
        self.begun.set_result(msgspec.convert(body, Begin))
        await self.started

    async def _ping(self, _: Any) -> None:
        """The event loop turns."""

    async def _metrics(self, _: Any) -> str:
        # In a thread, as a scrape is.
        page: bytes = await asyncio.to_thread(generate_latest, self._registry)
        return page.decode()

    async def _check(self, text: str) -> list[str]:
        """What keeps this process from running with the text."""
        assert self._gateway is not None
        try:
            wanted = await in_side_thread(partial(self._share, text))
        except ConfigError as error:
            return [str(error)]
        return refusals(wanted, self._gateway.config, self._gateway.router.layout)

    async def _reload(self, body: Any) -> Any:
        """Reload with the text, or say why not."""
        assert self._gateway is not None
        reloader = self._gateway.reloader
        assert isinstance(reloader, _AskingReloader)
        before, self._text = self._text, body["text"] or ""
        self._problem = "" if body["text"] is not None else body["problem"]
        outcome = await reloader.reload_here(body["cause"])
        if not outcome.is_successful:
            self._text = before
        return msgspec.to_builtins(outcome)

    async def _apply(self, body: Any) -> Any:
        assert self._relay is not None
        return await self._relay.apply(body["method"], body["request"])

    async def _stop(self, hurry: Any) -> None:
        self.stop.set()
        if hurry:
            self.hurry.set()


class _ReadElsewhereError(ConfigError):
    """The supervisor could not use the file: its words, which name the place."""

    def __init__(self, problem: str) -> None:
        super().__init__("", None, None, problem)

    def __str__(self) -> str:
        return self.message


class _AskingReloader(Reloader):
    """All processes reload together: who wants one process to reload asks the supervisor."""

    def __init__(self, peer: Peer, load: Callable[[], Config], **parts: Any) -> None:
        super().__init__(load, **parts)
        self._peer = peer

    async def reload(self, cause: str) -> Outcome:
        """Reload everywhere. The outcome is the first process's that has something against it."""
        return msgspec.convert(await self._peer.ask("reload", cause), Outcome)

    async def reload_here(self, cause: str) -> Outcome:
        """Reload this process."""
        return await super().reload(cause)


async def _main(end: socket.socket) -> int:
    worker = Worker()
    peer = await Peer.open(end, worker.handlers)
    run = asyncio.create_task(worker.run(peer))
    gone = asyncio.create_task(peer.closed.wait())
    await asyncio.wait((run, gone), return_when=asyncio.FIRST_COMPLETED)
    if not run.done() and not worker.begun.done():
        run.cancel()
    worker.stop.set()  # without a supervisor there is nothing to stay for
    code = (await asyncio.gather(run, return_exceptions=True))[0]
    gone.cancel()
    await peer.close()
    if isinstance(code, BaseException):
        structlog.get_logger("gateway").error("defect", where="worker", exc_info=code)
        return process.EXIT_RUNTIME
    return code


def main() -> int:
    """Run until the supervisor says otherwise, or is gone."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return process.run_loop(_main(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    raise SystemExit(main())
