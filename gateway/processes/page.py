"""The metrics page of several processes: asks all of them for theirs and merges, at each scrape."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import structlog
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from gateway.config.schema import Config
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges.metrics_families import Series, make_family
from gateway.edges.metrics_server import PageServer, serve_page
from gateway.edges.reload import fingerprint
from gateway.edges.security import Security
from gateway.processes import exposition
from gateway.processes.child import Child
from gateway.processes.exposition import Family, Page
from gateway.processes.peer import PeerError
from gateway.processes.plan import owned_ranks

TIMEOUT_S = 5.0
_log = structlog.get_logger("gateway.processes")


class MergedPage(Collector):
    """`collect` runs in the page's threads and waits for the event loop, which asks the processes."""

    def __init__(self, config: Config, children: Sequence[Child]) -> None:
        self.config = config
        self._children = children
        self._loop = asyncio.get_running_loop()
        self._server: PageServer | None = None
        self._last: dict[int, Page] = {}
        self._retired: dict[str, Family] = {}

    def start(self, address: str, security: Security) -> None:
        """Serve `/metrics`. Raises OSError that names the address."""
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(self)
        self._server = serve_page(host, int(port), registry, security)

    async def stop(self) -> None:
        """Stop serving. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    def retire(self, process: int) -> None:
        """A process has ended: what it had counted when it was asked last stays in the sums."""
        last = self._last.pop(process, None)
        if last is not None:
            # A new object: a scrape's thread may be about to add what was retired before.
            ended = exposition.counts_of(exposition.read([last]))
            exposition.add_retired(ended, self._retired)
            self._retired = ended

    def describe(self) -> list[Metric]:
        """Nothing: registration must not ask anybody."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What all processes export, and which of them are up."""
        pages, retired = asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(2 * TIMEOUT_S)
        families = exposition.read(pages)
        exposition.add_retired(families, retired)
        yield from exposition.metrics(families)
        yield make_family(catalogue.CONFIG_INFO, [((fingerprint(self.config),), 1)])
        up: list[Series] = [((str(child.number),), float(child.is_up)) for child in self._children]
        yield make_family(exposition.UP, up)
        yield make_family(exposition.RESTARTS, [((str(child.number),), child.restarts) for child in self._children])

    async def _ask(self) -> tuple[list[Page], Mapping[str, Family]]:
        """What the processes say, and what those that have ended had counted: of one moment, so that none is in both.

        Of a process that does not answer, what it said last: else its counts would come and go.
        """
        await asyncio.gather(*(self._ask_one(child) for child in self._children))
        return [self._last[process] for process in sorted(self._last)], self._retired

    async def _ask_one(self, child: Child) -> None:
        peer = child.peer
        try:
            text = await child.ask("metrics", timeout_s=TIMEOUT_S)
        except PeerError as error:
            if child.is_up:
                _log.warning("metrics_missing", process=child.number, error=str(error))
            return
        if child.peer is peer and child.is_up:  # else it was retired meanwhile
            self._last[child.number] = Page(child.number, text, owned_ranks(self.config, child.number))
