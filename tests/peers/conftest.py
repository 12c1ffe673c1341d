"""Sites and routers, started on first use and shared by the whole run: what a test leaves behind must be nothing."""

from pathlib import Path

import pytest

from tests.support.peer_router import Router
from tests.support.peers import FAMILIES, PEERS_BIN, RANKS, Site, Tokenizer, until

EXPECTED_WARNINGS = frozenset({"rank_lost", "rank_state"})
"""What a test that takes a rank away makes the gateway say."""


class Sites:
    """One gateway with its ranks per family, and the routers in front of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer: Tokenizer | None = None
        self._sites: dict[str, Site] = {}
        self._routers: dict[tuple[str, bool], Router] = {}

    def site(self, family: str) -> Site:
        if self._tokenizer is None:
            (self._directory / "tokenizer").mkdir()
            self._tokenizer = Tokenizer(self._directory / "tokenizer")
        if family not in self._sites:
            (self._directory / family).mkdir()
            self._sites[family] = Site(self._directory / family, family, self._tokenizer)
        self._sites[family].wait_ready()
        return self._sites[family]

    def router(self, family: str, *, dp_aware: bool) -> Router:
        site, key = self.site(family), (family, dp_aware)
        if key not in self._routers:
            self._routers[key] = Router(site.directory, site.grpc_port, dp_aware=dp_aware)
        self._routers[key].wait_ready()
        return self._routers[key]

    def stop(self) -> None:
        for router in self._routers.values():
            router.process.stop()
        for site in self._sites.values():
            site.stop()


@pytest.fixture(scope="session")
def sites(tmp_path_factory):
    if not (PEERS_BIN / "smg").exists():
        pytest.fail(f"there is no router in {PEERS_BIN.parent}: run `make test-peers`, which installs it first")
    sites = Sites(tmp_path_factory.mktemp("peers"))
    try:
        yield sites
    finally:
        sites.stop()


@pytest.fixture(params=FAMILIES)
def family(request):
    """Every test that takes it runs once per engine family."""
    return request.param


@pytest.fixture
def site(sites, family):
    """A gateway with its ranks, at rest before and after the test and without a complaint in its log."""
    site = sites.site(family)
    begin = len(site.log_lines())
    yield site
    until(lambda: site.in_flight() == [0] * RANKS, "the gateway's charges to return to 0")
    until(lambda: not any(rank["live"] or rank["kv_blocks"]["used"] for rank in site.ranks()), "the ranks to be idle")
    assert not [rank["bad_inputs"] for rank in site.ranks() if rank["bad_inputs"]["count"]]
    complaints = [line for line in site.log_lines()[begin:] if line["level"] not in ("debug", "info")]
    assert not [line for line in complaints if line["event"] not in EXPECTED_WARNINGS]


@pytest.fixture
def router(sites, site, family):
    """A router that leaves the choice of the rank to the gateway."""
    return sites.router(family, dp_aware=False)


@pytest.fixture
def dp_router(sites, site, family):
    """A router that chooses the rank itself."""
    return sites.router(family, dp_aware=True)
