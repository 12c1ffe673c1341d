"""Ranks as `gateway.v1.Rank` messages, at once or after each change."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from gateway.core.errors import GatewayError
from gateway.core.views import RankView
from gateway.edges.grpc_context import RpcContext
from gateway.v1 import gateway_pb2

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

WATCH_INTERVAL_S = 0.1

_STATES = {name.removeprefix("RANK_STATE_"): number for name, number in gateway_pb2.RankState.items()}


class RankFeed:
    """Looks at the ranks at most once per interval for all watchers together.

    The age of a snapshot grows all the time, so by itself it is no change.
    """

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._seen: list[RankView] = []
        self._version = 0
        self._message = b""
        self._looked_at: float | None = None
        self._closing = asyncio.Event()
        self._closing_error: GatewayError | None = None

    def now(self) -> list[gateway_pb2.Rank]:
        """Every rank, in order."""
        driver = self._driver
        return [to_message(view) for view in driver.router.rank_views(driver.clock())]

    async def watch(self, context: RpcContext) -> None:
        """Write the list now and after changes. Raises the error given to `close` once that is called."""
        context.accepted()
        seen = 0
        while self._closing_error is None:
            version, message = self.look(self._driver.clock())
            if version != seen:
                seen = version
                await context.write(message)
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._closing.wait()
            except TimeoutError:
                continue
        raise self._closing_error

    def close(self, error: GatewayError) -> None:
        """End every watch with the error."""
        self._closing_error = error
        self._closing.set()

    def look(self, now: float) -> tuple[int, bytes]:
        """The latest list as a WatchRanksResponse, and its version, which grows with each change."""
        # Half the interval: several watchers share a look, and a watcher alone still gets one per interval.
        if self._looked_at is None or now - self._looked_at >= WATCH_INTERVAL_S / 2:
            self._looked_at = now
            views = self._driver.router.rank_views(now)
            seen = [msgspec.structs.replace(view, snapshot_age_ms=None) for view in views]
            if seen != self._seen:
                self._seen = seen
                self._version += 1
                response = gateway_pb2.WatchRanksResponse(ranks=[to_message(view) for view in views])
                self._message = response.SerializeToString()
        return self._version, self._message


def to_message(view: RankView) -> gateway_pb2.Rank:
    """One rank; what it did not report stays absent."""
    values = {name: value for name, value in msgspec.structs.asdict(view).items() if value is not None}
    values["state"] = _STATES.get(view.state, gateway_pb2.RANK_STATE_UNSPECIFIED)
    return gateway_pb2.Rank(**values)
