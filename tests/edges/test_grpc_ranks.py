"""ListRanks and WatchRanks."""

import asyncio

import grpc
import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.ranks import RankState
from gateway.core.views import RankView
from gateway.edges import grpc_ranks
from gateway.edges.grpc_ranks import WATCH_INTERVAL_S, RankFeed, to_message
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import FakeDriver, make_view
from tests.support.grpc_edge import error_info, serve, until


def test_every_value_of_a_view_is_in_the_message():
    view = make_view(
        3,
        group="h",
        group_rank=1,
        state="LOST",
        incarnation=2,
        in_flight=4,
        reported_running=5,
        reported_waiting=6,
        running=7,
        waiting=8,
        foreign=9,
        kv_usage=0.5,
        snapshot_age_ms=12.5,
        cost=1.5,
    )
    message = to_message(view)
    assert message.state == gateway_pb2.RANK_STATE_LOST
    for name in set(RankView.__struct_fields__) - {"state"}:
        assert getattr(message, name) == getattr(view, name)


def test_zeros_are_shown_and_what_was_not_reported_is_absent():
    message = to_message(make_view(0, cost=None))
    assert {field.name for field, _ in message.ListFields()} == {
        "rank",
        "group",
        "group_rank",
        "state",
        "incarnation",
        "in_flight",
    }
    assert message.HasField("rank")
    assert message.rank == 0


@pytest.mark.parametrize("state", RankState)
def test_every_state_of_the_core_has_its_value(state):
    value = to_message(make_view(0, state=state.value)).state
    assert gateway_pb2.RankState.Name(value) == f"RANK_STATE_{state.value}"


async def test_list_ranks_shows_every_rank_in_order():
    async with serve() as edge:
        response = await edge.stub.ListRanks(gateway_pb2.ListRanksRequest())
        assert [rank.rank for rank in response.ranks] == [0, 1, 2, 3]


class TestWatch:
    async def test_the_full_list_at_once_and_after_a_change(self):
        async with serve() as edge:
            call = edge.stub.WatchRanks(gateway_pb2.WatchRanksRequest())
            first = await call.read()
            assert [rank.in_flight for rank in first.ranks] == [0, 0, 0, 0]
            edge.driver.router.views = [make_view(rank, in_flight=rank) for rank in range(4)]
            second = await call.read()
            assert [rank.in_flight for rank in second.ranks] == [0, 1, 2, 3]
            call.cancel()

    async def test_a_stop_ends_it_at_once(self):
        async with serve() as edge:
            call = edge.stub.WatchRanks(gateway_pb2.WatchRanksRequest())
            await call.read()
            await edge.servers.stop(60.0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert error_info(caught.value).reason == "DRAINING"


def in_flights(message):
    return [rank.in_flight for rank in gateway_pb2.WatchRanksResponse.FromString(message).ranks]


class TestFeed:
    def test_an_ageing_snapshot_alone_is_no_change(self):
        driver = FakeDriver()
        feed = RankFeed(driver)
        driver.router.views = [make_view(0, snapshot_age_ms=5.0)]
        first = feed.look(100.0)
        driver.router.views = [make_view(0, snapshot_age_ms=105.0)]
        assert feed.look(100.1) == first
        driver.router.views = [make_view(0, snapshot_age_ms=205.0, waiting=1)]
        version, message = feed.look(100.2)
        assert version > first[0]
        assert gateway_pb2.WatchRanksResponse.FromString(message).ranks[0].snapshot_age_ms == 205.0

    def test_watchers_share_a_look(self, monkeypatch):
        driver = FakeDriver()
        looks = []
        monkeypatch.setattr(driver.router, "rank_views", lambda now: looks.append(now) or driver.router.views)
        feed = RankFeed(driver)
        for watcher in range(100):
            feed.look(100.0 + watcher / 10_000)
        assert looks == [100.0]
        feed.look(100.0 + WATCH_INTERVAL_S)
        assert len(looks) == 2

    async def test_a_watcher_that_falls_behind_skips_to_the_latest(self, monkeypatch):
        monkeypatch.setattr(grpc_ranks, "WATCH_INTERVAL_S", 0.001)
        driver, messages, gate = FakeDriver(), [], asyncio.Event()
        feed = RankFeed(driver)

        class Transport:
            def accepted(self, stream=None):
                pass

            async def write(self, message):
                messages.append(message)
                await gate.wait()

        task = asyncio.create_task(feed.watch(Transport()))
        await until(lambda: messages)
        for count in range(1, 6):
            driver.router.views = [make_view(0, in_flight=count)]
            feed.look(driver.clock() + count)
        gate.set()
        await until(lambda: len(messages) >= 2)
        assert in_flights(messages[0]) == [0, 0, 0, 0]
        assert in_flights(messages[1]) == [5]
        feed.close(GatewayError(Reason.DRAINING, "stopping"))
        with pytest.raises(GatewayError):
            await task
