"""Several processes as one gateway: starts them, keeps them, and is what signals, scrapes and ranks' HELLOs go to.

It is no part of the data path. Clients reach the processes by themselves, as they share `listen.grpc`; what a rank and a
process have to say to each other goes over sockets of their own.
"""

import asyncio
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gateway import __version__, process
from gateway.config.schema import Config
from gateway.edges import logs
from gateway.edges.reload import FileWatch
from gateway.edges.security import Security
from gateway.edges.service_manager import ServiceManager
from gateway.processes.child import Child
from gateway.processes.handshakes import HandshakeRelay
from gateway.processes.held_port import HeldPort
from gateway.processes.page import MergedPage
from gateway.processes.peer import PeerError
from gateway.processes.plan import ranks_of
from gateway.processes.reload import JointReload
from gateway.processes.source import Source

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
"""Between the end of a process and its next start: twice as long each time."""
SETTLED_S = 60.0
"""A process that has run for so long begins with the first delay again."""
PING_INTERVAL_S = 5.0
SILENCE_S = 30.0
"""A process whose event loop does not turn for so long is ended, and started again."""
_APPLY_TIMEOUT_S = 10.0
_END_GRACE_S = 15.0
"""What a process gets beyond its drain before it is killed."""


def run(config: Config, source: Source, text: str, identity: object) -> int:
    """Serve with `config.processes` processes until a signal ends it. Returns the exit code.

    `text` is what the configuration was read from, `identity` what `file_identity` said of the file before that.
    """
    observability = config.observability
    logs.configure(observability.log_level, observability.log_format)
    process.raise_open_files_limit()
    directory = Path(tempfile.mkdtemp(prefix="rankgate-"))
    try:
        return process.run_loop(_serve(config, source, text, identity, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _serve(config: Config, source: Source, text: str, identity: object, directory: Path) -> int:
    supervisor = Supervisor(config, source, text, directory)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.on_stop)
    loop.add_signal_handler(signal.SIGHUP, supervisor.on_hangup)
    try:
        await supervisor.start()
    except (OSError, PeerError) as error:
        structlog.get_logger("gateway").error("start_failed", error=str(error), config=source.path)
        await supervisor.close()
        return process.EXIT_RUNTIME
    watch = FileWatch(
        Path(source.path),
        identity,
        lambda: supervisor.config.reload.watch_interval_s,
        partial(supervisor.reload, "file"),
    )
    watching = asyncio.create_task(watch.run())
    try:
        return await supervisor.run()
    finally:
        watching.cancel()
        await supervisor.close()


class Supervisor:
    """`start`, then `run` until stopped, then `close`."""

    def __init__(self, config: Config, source: Source, text: str, directory: Path) -> None:
        self.config = config
        self.log = structlog.get_logger("gateway")
        self._source = source
        self._directory = directory
        self._manager = ServiceManager()
        self._security = Security(config.listen)
        handlers = {"reload": self._on_reload, "everywhere": self._on_everywhere}
        self._children = [Child(number, handlers) for number in range(config.processes)]
        self._relay = HandshakeRelay(config, directory, self._on_ready)
        self._page = MergedPage(config, self._children)
        self._reload = JointReload(self._children, source, self._relay, text, config, self._in_force)
        self._held: HeldPort | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        # What a process that starts is asked for, so only what holds in those that run: the first that it refused would
        # keep it from ever starting.
        self._drained: dict[int, bytes] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def on_stop(self) -> None:
        """SIGTERM or SIGINT: drain; the second one: at once."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    def on_hangup(self) -> None:
        """SIGHUP: reload."""
        self._spawn(self.reload("SIGHUP"))

    async def reload(self, cause: str) -> Any:
        """Reload all processes, or none."""
        self._manager.reloading()
        try:
            return await self._reload.reload(cause)
        finally:
            self._say_ready()

    async def start(self) -> None:
        """Bind what is the supervisor's and start every process. Raises OSError or PeerError, saying what failed."""
        listen = self.config.listen
        try:
            self._held = HeldPort(listen.grpc)
        except OSError as error:
            problem = f"listen.grpc: cannot listen on {listen.grpc}: {error.strerror or error}"
            raise OSError(error.errno, problem) from error
        await self._security.start()
        if listen.metrics is not None:
            self._page.start(listen.metrics, self._security)
        self._relay.configure(self.config)
        await asyncio.gather(*(self._start(child) for child in self._children))
        self.log.info(
            "processes_started",
            version=__version__,
            processes=len(self._children),
            pids=[child.pid for child in self._children],
            grpc=self._held.address,
            metrics=listen.metrics,
            handshakes=self._relay.addresses,
        )

    async def run(self) -> int:
        """Keep the processes until a signal; then let all of them drain. Returns the exit code."""
        self._manager.ready(f"{len(self._children)} processes serve")
        self._spawn(self._manager.keep_alive())
        keepers = [self._spawn(self._keep(child)) for child in self._children]
        for child in self._children:
            self._spawn(self._watch(child))
        await self._stop.wait()
        self._manager.stopping(f"{len(self._children)} processes drain")
        await self._tell_to_stop(hurry=self._hurry.is_set())
        hurrying = self._spawn(self._pass_hurry_on())
        drain = self.config.drain
        _, late = await asyncio.wait(keepers, timeout=drain.delay_s + drain.grace_s + _END_GRACE_S)
        if late:
            self.log.error("processes_killed", processes=[child.number for child in self._children if child.is_up])
            self._kill()
            await asyncio.wait(keepers)
        hurrying.cancel()
        codes = {child.number: keeper.result() for child, keeper in zip(self._children, keepers, strict=True)}
        self.log.info("processes_stopped", codes=codes)
        return process.EXIT_OK if not any(codes.values()) else process.EXIT_RUNTIME

    async def close(self) -> None:
        """End what is left. Idempotent."""
        self._kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.wait() for child in self._children if child.pid is not None))
        await self._page.stop()
        await self._relay.close()
        await self._security.stop()
        if self._held is not None:
            self._held.close()
        self._manager.close()

    async def _start(self, child: Child) -> None:
        assert self._held is not None
        text = self._reload.text
        await child.start(
            {
                "process": child.number,
                "source": msgspec.to_builtins(self._source),
                "text": text,
                "directory": str(self._directory),
                "grpc": self._held.address,
            }
        )
        told: dict[int, bytes] = {}
        # It serves already, and to catch up may have to wait for a reload.
        await self._drain_again(child, told)
        await self._reload.catch_up(child, text)
        self._relay.started(child.number)
        await self._drain_again(child, told)

    async def _drain_again(self, child: Child, told: dict[int, bytes]) -> None:
        """Let a process that has started drain what is drained, but for what it was told already."""
        for rank, request in list(self._drained.items()):
            # Not what ended while it was asked for another one. A rank that is configured no more is unknown to it.
            if self._drained.get(rank) is request and told.get(rank) is not request and rank < ranks_of(self.config):
                told[rank] = request
                await self._apply(child, {"method": "DrainRank", "request": request})

    async def _apply(self, child: Child, body: Any) -> bytes | None:
        """Let a process do what all have to do; its answer, None without one."""
        try:
            answer: bytes = await child.ask("apply", body, _APPLY_TIMEOUT_S)
        except PeerError as error:
            self.log.warning("not_applied", process=child.number, method=body["method"], error=str(error))
            return None
        return answer

    async def _keep(self, child: Child) -> int:
        """Start the process again whenever it ends, until all are to stop. Returns its last exit code."""
        delay_s = FIRST_DELAY_S
        while True:
            since = time.monotonic()
            code = await child.wait()
            self._page.retire(child.number)
            self._relay.died(child.number)
            if self._stop.is_set():
                return code
            if time.monotonic() - since >= SETTLED_S:
                delay_s = FIRST_DELAY_S
            self.log.error("process_died", process=child.number, pid=child.pid, code=code, restart_in_s=delay_s)
            if await _happened(self._stop, delay_s):
                return process.EXIT_OK  # it had ended before, and was said to have
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            child.restarts += 1
            try:
                await self._start(child)
            except (OSError, PeerError) as error:
                self.log.error("process_not_started", process=child.number, error=str(error))  # noqa: TRY400
                child.kill()
            else:
                self.log.info("process_restarted", process=child.number, pid=child.pid)
            if self._stop.is_set():
                await self._tell_to_stop(hurry=self._hurry.is_set())

    async def _watch(self, child: Child) -> None:
        """End the process if it hangs: nobody else would notice."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            pid = child.pid
            try:
                await child.ask("ping", timeout_s=SILENCE_S)
            except PeerError as error:
                if child.is_up and child.pid == pid:
                    self.log.error("process_hangs", process=child.number, pid=pid, error=str(error))  # noqa: TRY400
                    child.kill()

    async def _tell_to_stop(self, *, hurry: bool) -> None:
        async def tell(child: Child) -> None:
            try:
                await child.ask("stop", hurry, _APPLY_TIMEOUT_S)
            except PeerError as error:
                if child.is_up:
                    self.log.warning("process_not_told", process=child.number, error=str(error))

        await asyncio.gather(*map(tell, self._children))

    async def _pass_hurry_on(self) -> None:
        await self._hurry.wait()
        await self._tell_to_stop(hurry=True)

    async def _on_reload(self, cause: str) -> Any:
        return msgspec.to_builtins(await self.reload(cause))

    async def _on_everywhere(self, body: Any) -> dict[int, bytes]:
        """The first process was asked for what all have to do. Returns the others' answers."""
        if body["method"] == "DrainRank":
            self._drained[body["rank"]] = body["request"]
        elif body["method"] == "UndrainRank":
            self._drained.pop(body["rank"], None)
        answers = {child.number: await self._apply(child, body) for child in self._children[1:]}
        return {number: answer for number, answer in answers.items() if answer is not None}

    def _on_ready(self, rank: int) -> None:
        """A new engine process has the rank: a restart is what it was drained for."""
        self._drained.pop(rank, None)

    def _in_force(self, config: Config) -> None:
        self.config = self._page.config = config
        logs.configure(config.observability.log_level, config.observability.log_format)

    def _say_ready(self) -> None:
        if not self._stop.is_set():
            self._manager.ready(f"{sum(child.is_up for child in self._children)} processes serve")

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _spawn(self, routine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(routine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _happened(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
