"""Prometheus metrics on a port of their own.

Nothing is pushed into a metrics library on the data path. Events leave plain integers in lists
(`observe_*`), the core keeps its own columns and counters, and a custom collector reads both when it
is scraped. The scrape runs in a thread of the HTTP server: it only reads, it copies a list or dict in
one step before it walks it, and a value that moves meanwhile is at worst one event old. That step is
`[:]` or `.copy()`: `list(d.items())` allocates on the way, which may run the garbage collector and
with it other threads.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from math import isnan

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from gateway import __version__
from gateway.config.schema import Config
from gateway.core.errors import Reason
from gateway.core.events import BatchReceived
from gateway.core.ranks import RankState, RankTable
from gateway.core.request import Request
from gateway.core.router import Router
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_status import CODES
from gateway.edges.log_outlet import LineLogger
from gateway.edges.metrics_families import (
    Book,
    Histogram,
    Series,
    core_counters,
    grow,
    link_counters,
    make_family,
    make_histogram,
    per_rank,
    series_of,
)
from gateway.edges.metrics_reload import ReloadMetrics
from gateway.edges.metrics_scheduling import SchedulingMetrics
from gateway.edges.metrics_server import PageServer, serve_page
from gateway.edges.reload import Reloader
from gateway.edges.security import Security
from gateway.native import compiled

# The bounds are vLLM's, so that its panels line up; inter-token latency adds three finer ones.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
DURATION_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_BREATH_S = 0.0001
_GIVEN_UP = (Reason.CANCELLED, Reason.ABORTED)


class Metrics(Collector):
    """What one gateway process exports. `observe_*` run on the event loop, `collect` in a thread.

    `link_counters` is any object whose attributes are integers, or dicts of integers by a bounded key.
    """

    def __init__(
        self,
        config: Config,
        router: Router,
        link_counters: object,
        *,
        security: Security | None = None,
        gate: CallGate | None = None,
        reloader: Reloader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reload = ReloadMetrics(config, reloader)
        self._router = router
        self._link_counters = link_counters
        self._security = Security(config.listen) if security is None else security
        self._gate = CallGate(config) if gate is None else gate
        self._clock = clock
        size = router.ranks.size
        self._books: dict[tuple[str, Reason | None], Book] = {}
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._ttft = Histogram(TTFT_BOUNDS)
        self._itl = Histogram(ITL_BOUNDS)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._scheduling = SchedulingMetrics(config, router)
        self._rank_ttft_count = [0] * size
        self._rank_ttft_sum = [0.0] * size
        self._last_batch_at: list[float] = [0.0] * size
        self._server: PageServer | None = None

    def configure(self, config: Config) -> None:
        """Another configuration is in force. Numbers of ranks that are no more are kept: they may be used again."""
        size = self._router.ranks.size
        grow(self._rank_ttft_count, size)
        grow(self._rank_ttft_sum, size)
        grow(self._last_batch_at, size)
        self._scheduling.configure(config)
        self._reload.configure(config)

    # --- the event loop's side -------------------------------------------------------------------

    def observe_ended(self, request: Request, now: float) -> None:
        """Count an accepted request; called once, when it has ended."""
        rpc = getattr(request.sink, "rpc", "unknown")
        error = request.error
        reason = None if error is None else error.reason
        book = self._books.get((rpc, reason)) or self._open_book(rpc, reason)
        book.count += 1
        accepted_at, first_token_at = request.accepted_at, request.first_token_at
        ended_at = now if request.ended_at is None else request.ended_at
        # Two observations for every request: without a call each.
        duration, durations = ended_at - accepted_at, book.durations
        durations.counts[bisect_left(DURATION_BOUNDS, duration)] += 1
        durations.total += duration
        if self._scheduling.is_busy:
            self._scheduling.observe_ended(request, ended_at)
        if first_token_at is not None:
            ttft, ttfts = first_token_at - accepted_at, self._ttft
            ttfts.counts[bisect_left(TTFT_BOUNDS, ttft)] += 1
            ttfts.total += ttft
        self._prompt_tokens += len(request.arrived.prompt_token_ids)
        cached_tokens = 0
        for sequence in request.sequences:
            if sequence.cached_tokens:
                cached_tokens = max(cached_tokens, sequence.cached_tokens)
            attempt = sequence.attempt
            if attempt is not None and attempt.first_token_at is not None:
                self._rank_ttft_count[attempt.rank] += 1
                self._rank_ttft_sum[attempt.rank] += attempt.first_token_at - attempt.sent_at
        if not request.is_cached:
            self._cached_tokens += cached_tokens

    def _open_book(self, rpc: str, reason: Reason | None) -> Book:
        """Resolve the labels of requests that end so, once."""
        outcome = "ok" if reason is None else "cancelled" if reason in _GIVEN_UP else "error"
        durations = self._durations.setdefault((rpc, outcome), Histogram(DURATION_BOUNDS))
        book = self._books[rpc, reason] = Book("OK" if reason is None else CODES[reason].name, durations)
        return book

    def observe_batch(self, event: BatchReceived, now: float) -> None:
        """Note a batch's arrival, before the core sees it; costs the same for one row and for a thousand.

        What decodes on the rank has waited since the rank's previous batch for its next token. So the
        time between the two counts once for each row, up to the number of decoding sequences. Of joined
        messages each has its share of that time: nothing else is known of when they were sent.
        """
        rows, rank, messages = len(event.batch.ids), event.rank, event.batch.messages
        if not rows:
            return
        last_at = self._last_batch_at
        decoding = self._router.ranks.in_flight_decode[rank]
        if decoding:
            self._itl.observe((now - last_at[rank]) / messages, min(rows, decoding * messages))
        last_at[rank] = now

    # --- serving ---------------------------------------------------------------------------------

    def start(self, host: str, port: int) -> int:
        """Serve `/metrics` in a thread. Returns the bound port.

        Raises OSError that names the address, or what of TLS and tokens can't be used.
        """
        security = self._security
        security.load()
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._server = serve_page(host, port, registry, security)
        return int(self._server.server_port)

    def stop(self) -> None:
        """Stop serving and wait for the thread; harmless when nothing is served."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()

    # --- the scrape ------------------------------------------------------------------------------

    def describe(self) -> list[Metric]:
        """Nothing: registration must not read the core."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family of the catalogue.

        The library renders a family before it asks for the next. The short sleeps between them let the
        event loop have the interpreter lock at once instead of after the 5 ms that a busy thread may keep it.
        """
        for families in (
            self._gateway_families(),
            self._rank_families(),
            core_counters(self._router.counters),
            link_counters(self._link_counters),
            self._latency_families(),
            self._scheduling.families(self._clock()),
            self._reload.families(),
        ):
            for family in families:
                yield family
                time.sleep(_BREATH_S)

    def _gateway_families(self) -> Iterator[Metric]:
        yield make_family(catalogue.BUILD_INFO, [((__version__, "no" if compiled is None else "yes"), 1)])
        yield make_family(catalogue.LIVE, [((), self._router.live_count)])
        yield make_family(catalogue.DRAINING, [((), int(self._router.is_draining))])
        yield make_family(catalogue.LOG_LINES_LOST, [((), LineLogger.lost)])
        yield make_family(catalogue.AUTH_FAILURES, list(self._security.failures()))
        yield make_family(catalogue.CREDENTIAL_LOADS, list(self._security.loads()))
        yield make_family(catalogue.CLIENT_STREAMS, [((), self._gate.streams)])
        yield make_family(catalogue.CLIENT_CONNECTIONS, [((), self._gate.connections)])
        yield make_family(catalogue.LIMIT_HITS, series_of(self._gate.hits))
        yield make_family(catalogue.HTTP2_ERRORS, series_of(self._gate.http2_faults.counts))
        yield make_family(catalogue.REQUESTS, self._ended())
        yield make_family(catalogue.PROMPT_TOKENS, [((), self._prompt_tokens)])
        yield make_family(catalogue.CACHED_TOKENS, [((), self._cached_tokens)])

    def _ended(self) -> "list[Series]":
        """Requests by RPC and code; several reasons share a code."""
        counts: dict[tuple[str, ...], int] = {}
        for (rpc, _), book in self._books.copy().items():
            counts[rpc, book.code] = counts.get((rpc, book.code), 0) + book.count
        return list(counts.items())

    def _rank_families(self) -> Iterator[Metric]:
        table = self._router.ranks
        ranks = range(table.size)
        for spec, read in catalogue.RANK_GAUGES:
            values = per_rank(ranks, partial(read, table))
            yield make_family(spec, [((str(rank),), value) for rank, value in values if value is not None])
        states = table.state[:]
        yield make_family(
            catalogue.RANK_STATE,
            [((str(rank), state.value), int(has is state)) for rank, has in enumerate(states) for state in RankState],
        )
        known = per_rank(ranks, partial(_rank_info, table))
        yield make_family(
            catalogue.RANK_INFO, [((str(rank), *labels), 1) for rank, labels in known if labels is not None]
        )
        now = self._clock()
        seen = [(rank, at) for rank, at in enumerate(table.snapshot_at[:]) if at is not None]
        yield make_family(catalogue.SNAPSHOT_AGE, [((str(rank),), max(0.0, now - at)) for rank, at in seen])
        yield make_family(catalogue.RANK_COST, self._newest_costs())

    def _newest_costs(self) -> "list[Series]":
        newest = self._router.decisions.latest(1)
        costs = newest[0].costs if newest else None
        # NaN: the rank was not evaluated (it was not eligible, or the pin left it out).
        return [((str(rank),), cost) for rank, cost in enumerate(costs or ()) if not isnan(cost)]

    def _latency_families(self) -> Iterator[Metric]:
        yield make_histogram(catalogue.TTFT, [((), self._ttft)])
        yield make_histogram(catalogue.ITL, [((), self._itl)])
        yield make_histogram(catalogue.REJECTION_DURATION, [((), self._gate.rejection_durations)])
        yield make_histogram(catalogue.DURATION, self._durations.copy().items())
        spec = catalogue.RANK_TTFT
        summary = SummaryMetricFamily(spec.full_name, spec.help, labels=spec.labels)
        counts, sums = self._rank_ttft_count[:], self._rank_ttft_sum[:]
        # A reload adds ranks to the table first and here later: a scrape may come between any two of these steps.
        for rank, count, total in zip(range(self._router.ranks.size), counts, sums, strict=False):
            summary.add_metric((str(rank),), count, total)
        yield summary


def _rank_info(table: RankTable, rank: int) -> tuple[str, str, str] | None:
    """Group, engine version and incarnation; None before the first join."""
    info = table.info[rank]
    if info is None:
        return None
    return table.group_names[table.group_of[rank]], info.engine_version, str(table.incarnation[rank])
