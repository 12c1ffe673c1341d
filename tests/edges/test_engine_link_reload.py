"""Ranks and groups that come and go while others are at work: their sockets are not touched."""

import socket

import pytest

from gateway.config.schema import Group, Sockets
from gateway.edges.engine_link import LinkError, LinkState
from tests.support.link_harness import ANY_PORT, make_config, open_fds, request, running_link
from tests.support.raw_engine import until


def more(name="more", ranks=1, handshake=ANY_PORT, **sockets):
    return Group(
        name=name,
        protocol="tokenspeed",
        handshake=handshake,
        ranks=ranks,
        sockets=Sockets(**({"transport": "ipc"} | sockets)),
    )


def configure(harness, ranks, *groups, layout=None):
    config = make_config(ranks=ranks, more_groups=groups, handshake=harness.config.groups[0].handshake)
    harness.config = config
    harness.link.configure(config, layout or config)
    return config


def addresses_of(harness, rank):
    channel = harness.link._ranks[rank]._channel
    return channel.input.address, channel.output.address


async def test_an_added_rank_joins_and_the_others_keep_their_sockets():
    async with running_link(ranks=1) as harness:
        old = await harness.joined_engine(0)
        bound, addresses = harness.link.handshake_addresses, addresses_of(harness, 0)
        configure(harness, 2)
        assert (harness.link.handshake_addresses, addresses_of(harness, 0)) == (bound, addresses)
        await harness.joined_engine(1)
        assert [(join.rank, join.incarnation) for join in harness.joins] == [(0, 1), (1, 1)]
        assert not harness.losses
        harness.link.send(0, 1, request("w-1"))
        assert await old.receive()


async def test_an_engine_that_dialled_before_its_rank_was_added_is_answered_then():
    async with running_link(ranks=1) as harness:
        early, gone = harness.engine(1), harness.engine(2)
        for number, engine in enumerate((early, gone), start=1):
            engine.hello()
            await until(lambda: harness.link.counters.handshakes.get("unknown_index") == number)  # noqa: B023
        gone.close()
        configure(harness, 3)
        await early.init()
        early.register()
        early.ready()
        await until(lambda: [join.rank for join in harness.joins] == [1], "the join")
        assert harness.link.state_of(2) in (LinkState.EMPTY, LinkState.JOINING)
        again = await harness.joined_engine(2)
        assert again.addresses


async def test_an_added_group_gets_its_own_address():
    async with running_link(ranks=1) as harness:
        await harness.joined_engine(0)
        configure(harness, 1, more(ranks=2))
        assert len(harness.link.handshake_addresses) == 2
        await harness.joined_engine(1, group=1)
        assert [join.rank for join in harness.joins] == [0, 2]


async def test_a_removed_rank_is_closed_and_its_hello_is_for_nobody():
    async with running_link(ranks=2) as harness:
        await harness.joined_engine(0)
        gone = await harness.joined_engine(1)
        addresses = addresses_of(harness, 0)
        harness.link.remove(1)
        harness.link.remove(1)
        assert harness.link.state_of(1) is LinkState.EMPTY
        gone.hello()
        await until(lambda: harness.link.counters.handshakes.get("unknown_index") == 1)
        assert harness.logged("handshake_unknown_index")[0]["configured"] == "0..0", "what is so after the reload"
        assert (addresses_of(harness, 0), harness.link.state_of(0)) == (addresses, LinkState.JOINED)
        assert not harness.losses, "nobody lost it"
        configure(harness, 1)
        assert harness.link.state_of(1) is LinkState.EMPTY, "it isn't wanted"
        configure(harness, 2)
        await harness.joined_engine(1)
        assert [(join.rank, join.incarnation) for join in harness.joins] == [(0, 1), (1, 1), (1, 1)]


async def test_the_address_of_a_removed_group_is_free_again():
    async with running_link(ranks=1) as harness:
        await harness.joined_engine(0)
        layout = configure(harness, 1, more(ranks=2))
        _, address = harness.link.handshake_addresses
        port = int(address.rpartition(":")[2])
        harness.link.remove(1)
        assert harness.link.handshake_addresses[1:] == [address]
        configure(harness, 1, layout=layout)
        harness.link.remove(2)
        assert len(harness.link.handshake_addresses) == 1
        # While others are leaving, the layout still has it; that brings nothing back.
        configure(harness, 1, layout=layout)
        assert len(harness.link.handshake_addresses) == 1
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await until(lambda: can_bind(probe, port), "the port")
        configure(harness, 1, more(name="other"))
        await harness.joined_engine(0, group=1)
        assert harness.joins[-1].rank == 1


def can_bind(probe, port):
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("is_bad_host", [False, True])
async def test_an_address_that_cant_be_bound_changes_nothing(is_bad_host):
    async with running_link(ranks=1) as harness:
        old = await harness.joined_engine(0)
        before = harness.link.handshake_addresses
        fds = open_fds()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            bad = more("bad", transport="tcp", host="192.0.2.7") if is_bad_host else more("bad", handshake=address)
            with pytest.raises(LinkError):
                configure(harness, 2, more("good"), bad)
            assert harness.link.handshake_addresses == before
            await until(lambda: set(open_fds()) - set(fds) <= {str(taken.fileno())}, "the sockets to be gone")
        engine = harness.engine(1, group=0)
        engine.hello()
        await until(lambda: harness.link.counters.handshakes.get("unknown_index") == 1)
        harness.link.send(0, 1, request("w-1"))
        assert await old.receive()
        configure(harness, 2)
        await harness.joined_engine(1)


async def test_sockets_in_use_in_a_shared_directory_are_let_alone(tmp_path, monkeypatch):
    async with running_link(tmp_path / "state", ranks=1) as harness:
        old = await harness.joined_engine(0)
        knocks = []
        monkeypatch.setattr("gateway.edges.engine_link.endpoints._is_listening", knocks.append)
        configure(harness, 1, more())
        assert knocks == []
        await harness.joined_engine(0, group=1)
        harness.link.send(0, 1, request("w-1"))
        assert await old.receive()
        assert not harness.losses


async def test_a_removed_rank_is_not_awaited_after_a_restart(tmp_path):
    async with running_link(tmp_path / "state", ranks=2) as harness:
        await harness.joined_engine(1)
        harness.link.remove(1)
        configure(harness, 2)
        assert harness.link.state_of(1) is LinkState.EMPTY
        await harness.joined_engine(1)
        assert [join.incarnation for join in harness.joins] == [1, 2], "the count on disk goes on"
