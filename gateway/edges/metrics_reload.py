"""What metrics say of the configuration: which one is in force, and how its reloads went."""

import time
from collections.abc import Iterator

from prometheus_client.core import Metric

from gateway.config.schema import Config
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges.metrics_families import make_family, series_of
from gateway.edges.reload import RESULTS, Reloader, fingerprint


class ReloadMetrics:
    """Reads the reloader. A gateway that was not started from a file has none, and reloads nothing."""

    def __init__(self, config: Config, reloader: Reloader | None) -> None:
        self._reloader = reloader
        self._started_at_unix_s = time.time()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Another configuration is in force."""
        self._sha256 = fingerprint(config)

    def families(self) -> Iterator[Metric]:
        """Every family of this module."""
        reloader = self._reloader
        counts: dict[str, int] = dict.fromkeys(RESULTS, 0)
        last, applied_at = None, self._started_at_unix_s
        if reloader is not None:
            counts, last, applied_at = reloader.counts, reloader.last, reloader.applied_at_unix_s
        yield make_family(catalogue.CONFIG_INFO, [((self._sha256,), 1)])
        yield make_family(catalogue.CONFIG_RELOADS, series_of(counts))
        yield make_family(catalogue.CONFIG_RELOADED, [((), int(last is None or last.is_successful))])
        yield make_family(catalogue.CONFIG_RELOADED_AT, [((), applied_at)])
