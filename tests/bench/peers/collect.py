"""Runs scenarios on peers, interleaved, and keeps every figure."""

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.peers.kinds import PEERS, Peer
from tests.bench.peers.process import LOAD_CORE, SERVER_CORE, PeerError, Process, free_port, own_python
from tests.bench.peers.scenarios import ALL, DIRECT, EVERYWHERE, MEMORY, SCALE, Scenario
from tests.bench.peers.site import Figures, Site

START_TRIES = 2
DIRECT_S = 40


class Results:
    """What was measured, by scenario and peer, and what was not and why."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, list[Figures]]] = {}
        self.failures: dict[str, dict[str, str]] = {}
        self.not_run: dict[str, str] = {}
        self.direct: Figures = {}

    def add(self, scenario: str, peer: str, measure: Callable[[], Figures]) -> None:
        """One measurement, or why there is none."""
        try:
            self.runs.setdefault(scenario, {}).setdefault(peer, []).append(measure())
        except PeerError as error:
            self.failures.setdefault(scenario, {})[peer] = str(error)

    def median(self, scenario: str, peer: str, figure: str) -> float | None:
        """The median over the repeats."""
        values = self.values(scenario, peer, figure)
        return statistics.median(values) if values else None

    def values(self, scenario: str, peer: str, figure: str) -> list[float]:
        """A figure in every repeat, in order of size."""
        return sorted(run[figure] for run in self.runs.get(scenario, {}).get(peer, []) if figure in run)

    def document(self) -> dict[str, Any]:
        """Everything, for a file."""
        peers = {name: {"title": PEERS[name].title, "not_run": self.not_run.get(name)} for name in PEERS}
        scenarios: dict[str, Any] = {}
        for scenario in [*self.runs, *(name for name in self.failures if name not in self.runs)]:
            entry = scenarios[scenario] = {}
            for peer, runs in self.runs.get(scenario, {}).items():
                entry[peer] = {figure: self._spread(scenario, peer, figure) for run in runs[:1] for figure in run}
            for peer, why in self.failures.get(scenario, {}).items():
                entry.setdefault(peer, {})["failed"] = why
        return {"peers": peers, "direct": self.direct, "scenarios": scenarios}

    def _spread(self, scenario: str, peer: str, figure: str) -> dict[str, Any]:
        values = self.values(scenario, peer, figure)
        return {"median": statistics.median(values), "low": values[0], "high": values[-1], "values": values}


class Collection:
    """One run of the benchmark."""

    def __init__(
        self, directory: Path, names: Iterable[str], peers: Iterable[str], *, repeats: int, quick: bool
    ) -> None:
        self.results = Results()
        self._directory = directory
        self._scenarios = [ALL[name].quick() if quick else ALL[name] for name in names]
        self._peers = [PEERS[name] for name in peers]
        self._repeats = repeats
        self._numbers = iter(range(10**6))

    def run(self) -> Results:
        """Everything that was asked for."""
        shared = [each for each in self._scenarios if each.name in EVERYWHERE | DIRECT]
        if shared:
            self._measure_direct()
            self._measure_shared(shared)
        for scenario in self._scenarios:
            if scenario.name in MEMORY:
                for peer in (each for each in self._peers if each.same_job):
                    self._measure_fresh(peer, [scenario])
        scale = [each for each in self._scenarios if each.name in SCALE]
        for ranks in sorted({each.fresh for each in scale}):
            for peer in (each for each in self._peers if each.name == "fast"):
                self._measure_fresh(peer, [each for each in scale if each.fresh == ranks])
        return self.results

    def _open(self, peer: Peer, ranks: int = 1) -> Site:
        """A running site. Ports may be lost to somebody else between choice and use: tried twice. Raises PeerError."""
        for left in reversed(range(START_TRIES)):
            try:
                return Site(peer, self._directory / f"{peer.name}-{next(self._numbers)}", ranks)
            except PeerError:
                if not left:
                    raise
        raise AssertionError

    def _measure_shared(self, scenarios: list[Scenario]) -> None:
        """All peers are up at once; each measurement of one is next to those of the others."""
        with contextlib.ExitStack() as stack:
            sites = []
            for peer in self._peers:
                try:
                    sites.append(stack.enter_context(self._open(peer)))
                except PeerError as error:
                    self.results.not_run[peer.name] = str(error)
                    say(f"{peer.name}: not run: {error}")
            for scenario in scenarios:
                for repeat in range(self._repeats):
                    turn = repeat % max(1, len(sites))
                    for site in sites[turn:] + sites[:turn]:
                        if site.peer.same_job or scenario.name in EVERYWHERE:
                            with alone(site, sites):
                                self.results.add(scenario.name, site.peer.name, partial(site.measure, scenario))
                self._say(scenario)
            if any(scenario.name == "light" for scenario in scenarios):
                self._measure_behind(sites, next(each for each in scenarios if each.name == "light"))

    def _measure_behind(self, sites: list[Site], light: Scenario) -> None:
        """What stands behind a proxy, asked without it."""
        for site in sites:
            if site.peer.engine == "grpc":
                with alone(site, sites), site.directly(), contextlib.suppress(PeerError):
                    self.results.direct[site.peer.name] = site.measure(light)["ttft_p50_ms"]

    def _measure_fresh(self, peer: Peer, scenarios: list[Scenario]) -> None:
        began = time.monotonic()
        try:
            with self._open(peer, scenarios[0].fresh) as site:
                for scenario in scenarios:
                    self.results.add(scenario.name, peer.name, partial(site.measure, scenario))
        except PeerError as error:
            for scenario in scenarios:
                self.results.failures.setdefault(scenario.name, {})[peer.name] = str(error)
        for scenario in scenarios:
            self._say(scenario)
        say(f"  ({time.monotonic() - began:.0f} s)")

    def _measure_direct(self) -> None:
        """The time to a rank and back without a gateway."""
        port = free_port()
        server = Process(SERVER_CORE, own_python("direct", port), self._directory / "direct.log")
        address = f"tcp://127.0.0.1:{port}"
        engine = Process(LOAD_CORE, own_python("emitter", address, 1), self._directory / "direct-rank.log", speaks=True)
        try:
            engine.expect("READY")
            server.wait(DIRECT_S)
            self.results.direct |= {"zmq": json.loads(server.said())["ttft_p50_ms"]}
        except (PeerError, subprocess.TimeoutExpired, ValueError) as error:
            say(f"direct: {error}")
        finally:
            engine.stop()
            server.stop()

    def _say(self, scenario: Scenario) -> None:
        for peer in self._peers:
            value = self.results.median(scenario.name, peer.name, scenario.unit)
            why = self.results.failures.get(scenario.name, {}).get(peer.name)
            if value is not None or why:
                text = "" if value is None else f"{value:.2f} {scenario.unit}"
                say(f"{scenario.name} {peer.name}: {text}{f' failed: {why}' if why else ''}")


@contextlib.contextmanager
def alone(site: Site, sites: list[Site]) -> Iterator[None]:
    """The others are paused meanwhile."""
    with contextlib.ExitStack() as stack:
        for other in sites:
            if other is not site:
                stack.enter_context(other.paused())
        yield


def say(text: str) -> None:
    """Progress."""
    print(text, flush=True)
