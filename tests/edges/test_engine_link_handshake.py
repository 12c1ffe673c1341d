"""Joining: every order and every disorder of the handshake."""

import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from gateway.config.schema import Group
from gateway.core.events import BatchReceived, RankJoined, RankLost, SendBlocked
from gateway.edges.engine_link import LinkError, LinkState
from tests.support.link_harness import LinkHarness, make_config, nothing_left_behind, request, running_link
from tests.support.raw_engine import RawEngine, pack, ready_response, until

FAMILIES = ("tokenspeed", "vllm")
TRANSPORTS = ("ipc", "tcp")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_rank_joins_with_what_it_said_of_itself(family, transport):
    async with running_link(family=family, transport=transport) as harness:
        await harness.joined_engine(1)
        (join,) = harness.joins
        assert (join.rank, join.incarnation, join.reattached) == (1, 1, False)
        assert (join.info.max_model_len, join.info.block_size, join.info.max_num_seqs) == (4096, 16, 8)


@pytest.mark.parametrize("ready_first", [True, False])
async def test_ready_and_registration_come_in_either_order_and_both_are_needed(ready_first):
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        first, second = (engine.ready, engine.register) if ready_first else (engine.register, engine.ready)
        first()
        await until(lambda: harness.link.counters.handshakes.get("ready" if ready_first else "registered") == 1)
        assert not harness.joins
        second()
        await until(lambda: len(harness.joins) == 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_rank_gets_its_own_addresses(transport):
    async with running_link(ranks=3, transport=transport) as harness:
        engines = [await harness.joined_engine(index) for index in (2, 0, 1)]
        assert len({address for engine in engines for address in engine.addresses}) == 6
        assert {join.rank for join in harness.joins} == {0, 1, 2}


async def test_ranks_may_dial_before_the_gateway_listens():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    engine = RawEngine(f"tcp://127.0.0.1:{port}")
    engine.hello()
    try:
        # The engine's own reconnects change the set of descriptors: leaks are looked for elsewhere.
        async with running_link(handshake=f"tcp://127.0.0.1:{port}", checks_leaks=False) as harness:
            await engine.init()
            engine.ready()
            engine.register()
            await until(lambda: len(harness.joins) == 1)
    finally:
        engine.close()


async def test_engine_indexes_count_from_the_groups_start_index_and_ranks_over_all_groups():
    second = Group(name="second", protocol="vllm", handshake="tcp://127.0.0.1:0", ranks=2, start_index=7)
    async with running_link(ranks=2, start_index=300, more_groups=(second,)) as harness:
        await harness.joined_engine(301)
        await harness.joined_engine(8, group=1)
        assert [join.rank for join in harness.joins] == [1, 3]


async def test_a_second_hello_while_joining_gets_fresh_addresses():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        first = await engine.init()
        restarted = harness.engine(0)
        restarted.hello()
        second = await restarted.init()
        assert not set(first) & set(second)
        restarted.ready()
        restarted.register()
        await until(lambda: len(harness.joins) == 1)
        assert harness.link.counters.handshakes["duplicate_hello"] == 1


async def test_ready_without_a_hello_is_counted_and_the_rank_can_still_join():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.ready()
        await until(lambda: harness.link.counters.handshakes.get("unexpected_ready") == 1)
        await engine.join()
        await until(lambda: len(harness.joins) == 1)


@pytest.mark.parametrize(
    ("identity", "frames", "outcome"),
    [
        (b"\0\0", [b"\xc1 not msgpack"], "garbage"),
        (b"\0\0", [b""], "garbage"),
        (b"\0\0", [pack({"status": "GOODBYE"})], "garbage"),
        (b"\0\0", [pack([1, 2, 3])], "garbage"),
        (b"\0\0", [b"x" * 70_000], "oversized"),
        (b"\x02\0", [pack({"status": "HELLO"})], "unknown_index"),
        (b"\xff\xff", [pack({"status": "HELLO"})], "unknown_index"),
        (b"\0\0\0", [pack({"status": "HELLO"})], "bad_identity"),
        (b"\x01", [pack({"status": "HELLO"})], "bad_identity"),
        (b"", [pack({"status": "HELLO"})], "bad_identity"),
    ],
)
async def test_garbage_on_the_handshake_port_is_counted_and_ends_nothing(identity, frames, outcome):
    async with running_link() as harness:
        stray = harness.engine(0)
        socket_ = stray.dial(stray.handshake_address, zmq.DEALER, identity)
        socket_.send_multipart(frames)
        await until(lambda: harness.link.counters.handshakes.get(outcome) == 1, outcome)
        assert harness.logged(f"handshake_{outcome}")
        socket_.close()
        stray.close()
        await harness.joined_engine(0)


async def test_an_engine_beyond_the_configured_ranks_is_told_of_in_its_own_numbers():
    async with running_link(ranks=2, start_index=4) as harness:
        harness.engine(6).hello()
        await until(lambda: harness.logged("handshake_unknown_index"))
        (line,) = harness.logged("handshake_unknown_index")
        assert (line["engine_index"], line["configured"]) == (6, "4..5")
        assert line["hint"] == "raise groups[].ranks, or correct start_index"


async def test_a_frame_beyond_the_sockets_bound_only_costs_its_sender_the_connection():
    async with running_link() as harness:
        stray = harness.engine(1)
        stray.handshake.send(b"x" * (2 << 20))
        await harness.joined_engine(0)
        assert "garbage" not in harness.link.counters.handshakes


async def test_strays_that_dont_speak_zmtp_disturb_nobody():
    async with running_link(transport="tcp") as harness:
        engine = await harness.joined_engine(0)
        for address in (*engine.addresses, harness.link.handshake_addresses[0]):
            host, port = address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as stray:
                stray.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        assert not harness.losses


async def test_repeated_garbage_is_logged_once():
    async with running_link() as harness:
        stray = harness.engine(0)
        for _ in range(50):
            stray.handshake.send(b"\xc1")
        await until(lambda: harness.link.counters.handshakes.get("garbage") == 50)
        assert len(harness.logged("handshake_garbage")) == 1


async def test_a_hello_of_a_connected_rank_waits_until_the_old_connection_is_gone():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        successor = harness.engine(0)
        successor.hello()
        await until(lambda: harness.link.counters.handshakes.get("held") == 1)
        successor.hello()
        await until(lambda: harness.link.counters.handshakes.get("held_again") == 1)
        engine.push_rows([("still-alive", [1], "")])
        await until(lambda: harness.rows == ["still-alive"])
        assert not successor.handshake.poll(0)
        engine.close()
        await successor.init()
        successor.ready()
        successor.register()
        await until(lambda: len(harness.joins) == 2)
        order = [(type(event), event.incarnation) for event in harness.events]
        assert order == [(RankJoined, 1), (BatchReceived, 1), (SendBlocked, 1), (RankLost, 1), (RankJoined, 2)]
        assert not successor.handshake.poll(50), "one INIT for any number of held HELLOs"


async def test_a_registration_that_cant_be_read_ends_that_attempt_only():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        engine.ready()
        engine.register(pack({"max_model_len": "many"}))
        await until(lambda: harness.link.counters.handshakes.get("bad_registration") == 1)
        assert harness.link.state_of(0) is LinkState.EMPTY
        engine.close()
        await harness.joined_engine(0)


async def test_a_rank_that_dies_between_registration_and_ready_can_come_back():
    async with running_link(family="vllm") as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        engine.register()
        await until(lambda: harness.link.counters.handshakes.get("registered") == 1)
        engine.close()
        await until(lambda: harness.link.state_of(0) is LinkState.EMPTY)
        await harness.joined_engine(0)
        assert [join.incarnation for join in harness.joins] == [1]


async def test_a_foreign_identity_on_a_ranks_socket_doesnt_register_it():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        addresses = await engine.init()
        engine.ready()
        stray = engine.dial(addresses[0], zmq.DEALER, b"\x01\x00")
        stray.send(ready_response("tokenspeed", max_model_len=1))
        await until(lambda: harness.link.counters.noise.get("foreign_identity") == 1)
        assert not harness.joins
        engine.register()
        await until(lambda: len(harness.joins) == 1)
        assert harness.joins[0].info.max_model_len == 4096
        stray.close()
        assert harness.link.state_of(0) is LinkState.JOINED


async def test_a_strays_visit_before_the_registration_doesnt_end_the_handshake():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        addresses = await engine.init()
        strays = [engine.dial(addresses[0], zmq.DEALER, b"\xaa\xaa"), engine.dial(addresses[1], zmq.PUSH)]
        channel = harness.link._ranks[0]._channel
        await until(lambda: channel.is_up)
        for stray in strays:
            stray.close()
        await until(lambda: not channel.input.connections.is_up and not channel.output.connections.is_up)
        engine.ready()
        engine.register()
        await until(lambda: len(harness.joins) == 1)


async def test_an_engine_that_is_gone_when_its_held_hello_is_answered_costs_nothing():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        successor = harness.engine(0)
        successor.hello()
        await until(lambda: harness.link.counters.handshakes.get("held") == 1)
        successor.close()
        engine.close()
        await until(lambda: harness.link.counters.handshakes.get("init_undeliverable") == 1)
        await harness.joined_engine(0)


async def test_the_join_is_complete_when_it_is_announced():
    """The core may dispatch from within the event."""
    async with running_link() as harness:

        def dispatch(event):
            harness.events.append(event)
            if isinstance(event, RankJoined):
                harness.link.send(event.rank, event.incarnation, request("at-once"))

        harness.link._env.events._emit = dispatch
        engine = await harness.joined_engine(0)
        frames = await engine.receive()
        assert frames[0] == b"\x00"
        assert not harness.send_events


async def test_a_hello_for_which_there_were_no_sockets_is_answered_later(monkeypatch):
    async with running_link() as harness:
        fails_left, real = [6], zmq.Context.socket

        def out_of_files(context, kind):
            if context is harness.link._env.context and fails_left[0]:
                fails_left[0] -= 1
                if fails_left[0] % 3 == 0:
                    raise zmq.ZMQError(24)
            return real(context, kind)

        monkeypatch.setattr(zmq.Context, "socket", out_of_files)
        await harness.joined_engine(0)
        assert harness.link.counters.handshakes["no_sockets"] == 2
        assert harness.logged("no_sockets_for_rank")


async def test_more_ranks_than_one_look_takes_all_get_their_turn(monkeypatch):
    monkeypatch.setattr("gateway.edges.engine_link.link.RANKS_PER_LOOK", 2)
    async with running_link(ranks=5) as harness:
        seen = set()
        for number, rank in enumerate(harness.link._ranks):
            rank.poke = lambda *, with_monitors, number=number: seen.add((number, with_monitors))
        await until(lambda: seen == {(number, monitors) for number in range(5) for monitors in (True, False)})


# --- what ends a start ---------------------------------------------------------------------------


async def start_fails(config) -> LinkError:
    harness = LinkHarness(config)
    with nothing_left_behind(), pytest.raises(LinkError) as caught:
        await harness.link.start()
    return caught.value


async def test_a_taken_handshake_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = await start_fails(make_config(handshake=address))
    assert error.address == address
    assert "in use" in str(error)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "0"])
async def test_a_wildcard_handshake_needs_an_explicit_setting(host):
    error = await start_fails(make_config(handshake=f"tcp://{host}:0"))
    assert "allow_wildcard" in str(error)


async def test_a_wildcard_handshake_with_the_setting():
    async with running_link(handshake="tcp://0.0.0.0:0", allow_wildcard=True) as harness:
        port = harness.link.handshake_addresses[0].rpartition(":")[2]
        engine = RawEngine(f"tcp://127.0.0.1:{port}")
        harness.engines.append(engine)
        await engine.join()
        await until(lambda: len(harness.joins) == 1)
        assert engine.addresses[0].startswith("ipc://")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
async def test_data_sockets_never_bind_a_wildcard(host):
    error = await start_fails(make_config(transport="tcp", host=host, allow_wildcard=True))
    assert "announced" in str(error)


@pytest.mark.parametrize("host", ["192.0.2.1", "localhost", "no such host"])
async def test_a_data_host_that_cant_be_bound_fails_at_start_and_not_at_the_first_hello(host):
    error = await start_fails(make_config(transport="tcp", host=host))
    assert error.address == f"tcp://{host}"


async def test_a_socket_directory_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o750)
    error = await start_fails(make_config(dir=str(tmp_path)))
    assert "chmod 700" in str(error)


async def test_a_link_to_a_socket_directory_is_refused(tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    error = await start_fails(make_config(dir=str(tmp_path / "link")))
    assert "symbolic" in str(error)


async def test_a_socket_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    error = await start_fails(make_config(dir=str(tmp_path)))
    assert "belongs to" in str(error)


async def test_a_socket_path_that_is_too_long_is_refused(tmp_path):
    error = await start_fails(make_config(dir=str(tmp_path / ("d" * 120))))
    assert "107" in str(error)


async def test_stale_sockets_are_removed_and_nothing_else(tmp_path):
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    stale = directory / "rg-0-0-stale"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    (directory / "rg-notes").write_text("not a socket")
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(directory / "rg-9-9-live"))
        live.listen()
        async with running_link(dir=str(directory)) as harness:
            await harness.joined_engine(0)
            assert not stale.exists()
    assert sorted(path.name for path in directory.iterdir()) == ["rg-9-9-live", "rg-notes"]


async def test_ipc_handshake_replaces_a_stale_socket_but_neither_a_file_nor_a_live_one(tmp_path):
    path = tmp_path / "h"
    address = f"ipc://{path}"
    path.write_text("precious")
    assert "not a socket" in str(await start_fails(make_config(handshake=address)))
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert "in use" in str(await start_fails(make_config(handshake=address)))
    async with running_link(handshake=address) as harness:
        await harness.joined_engine(0)


async def test_the_temporary_directory_is_private_and_goes_away():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        directory = Path(engine.addresses[0].removeprefix("ipc://")).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("version", "family_of"), [("tokenspeed-0.1.1", "tokenspeed"), ("0.32.0", "vllm"), ("", None)])
async def test_an_engine_of_another_family_is_an_error_in_the_log(family, version, family_of):
    async with running_link(family=family) as harness:
        await harness.engine(0).join(ready_response(family, vllm_version=version))
        await until(lambda: harness.joins)
        assert len(harness.logged("protocol_mismatch")) == (family_of not in (family, None))
