"""Floods, slowness and age: each kind runs into its bound, and honest clients that look a little alike don't."""

import pytest

from gateway.h2.protocol import frames, settings
from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.frames import (
    ACK,
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
)
from gateway.h2.rpc import status
from tests.h2.by_hand import FIELDS, Peer

CALM = ErrorCode.ENHANCE_YOUR_CALM
CANCEL = (8).to_bytes(4)


def ping(number=0):
    return frame(PING, 0, 0, number.to_bytes(8))


@pytest.mark.parametrize("per_read", [1, 50])
def test_opening_and_cancelling_streams_without_end(per_read):
    peer = Peer(resets_burst=100.0, resets_per_s=10.0)
    block = peer.block()
    opened = 0
    while peer.failure is None and opened < 1000:
        peer.send(
            *(
                frames.headers(number, block, is_end=True) + frame(RST_STREAM, 0, number, CANCEL)
                for number in (2 * (opened + each) + 1 for each in range(per_read))
            )
        )
        opened += per_read
    assert peer.failure.code is CALM
    assert opened <= 100 + per_read


def test_cancelling_as_many_as_may_be_open_is_fine_and_so_is_cancelling_now_and_then():
    peer = Peer(max_streams=100, resets_burst=200.0, resets_per_s=10.0)
    for _ in range(10):
        numbers = [peer.request(is_end=True) for _ in range(100)]
        peer.send(*(frame(RST_STREAM, 0, number, CANCEL) for number in numbers))
        peer.now += 10.0
    assert peer.failure is None


def test_making_us_cancel_streams_counts_as_well():
    peer = Peer(resets_burst=100.0, resets_per_s=0.0)
    for _ in range(200):
        number = peer.request()
        peer.send(frame(WINDOW_UPDATE, 0, number, bytes(4)))
        if peer.failure is not None:
            break
    assert peer.failure.code is CALM
    assert len(peer.started()) <= 101


CHORES = {
    "SETTINGS": frames.settings(()),
    "PRIORITY": frame(PRIORITY, 0, 9, bytes(5)),
    "an unknown type": frame(0xEE, 0, 0),
    "empty DATA": frame(DATA, 0, 1),
    "GOAWAY": frame(GOAWAY, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("name", CHORES)
def test_frames_that_bring_nothing(name):
    peer = Peer(chores_burst=50.0, chores_per_s=10.0)
    peer.request()
    for _ in range(9):
        peer.send(*[CHORES[name]] * 10)
        peer.now += 1.0
        assert peer.failure is None
    peer.send(*[CHORES[name]] * 60)
    assert peer.failure.code is CALM


def test_pings_that_come_too_soon():
    peer = Peer(min_client_ping_s=10.0)
    for number in range(3):
        peer.send(ping(number))
        peer.now += 1.0
    assert peer.failure is None
    assert [each.payload for each in peer.of(PING) if each.flags & ACK] == [n.to_bytes(8) for n in range(3)]
    peer.send(ping())
    assert (peer.failure.code, peer.failure.message) == (CALM, "too_many_pings")


def test_pings_at_their_interval_and_those_that_measure_what_we_send_are_fine():
    peer = Peer(min_client_ping_s=10.0, chores_burst=1000.0)
    for _ in range(20):
        peer.send(ping())
        peer.now += 10.0
    number = peer.request(is_end=True)
    peer.connection.send_headers(peer.stream(number), status.HEAD)
    for _ in range(20):
        assert peer.stream(number).push(b"token")
        peer.take()
        peer.send(ping())
    assert peer.failure is None


def test_window_updates_without_anything_sent():
    peer = Peer(window_updates_burst=100.0)
    update = frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4))
    number = peer.request(is_end=True)
    peer.connection.send_headers(peer.stream(number), status.HEAD)
    for _ in range(500):
        assert peer.stream(number).push(b"x")
        peer.take()
        peer.send(update, frame(WINDOW_UPDATE, 0, number, (6).to_bytes(4)))
    assert peer.failure is None, "they answer what was sent"
    peer.send(*[update] * 101)
    assert peer.failure.code is CALM


@pytest.mark.parametrize("part", [b"", b"\x82"], ids=["empty", "one byte"])
def test_a_header_block_without_end(part):
    peer = Peer()
    peer.send(frame(HEADERS, 0, 1, b"\x82"))
    peer.send(*[frame(CONTINUATION, 0, 1, part)] * 15)
    assert peer.failure is None
    peer.send(frame(CONTINUATION, 0, 1, part))
    assert peer.failure.code is CALM


def test_a_header_block_of_any_size():
    peer = Peer(max_header_list_bytes=10_000)
    peer.send(frame(HEADERS, 0, 1, bytes(16_000)), frame(CONTINUATION, 0, 1, bytes(16_000)))
    assert peer.failure.code is CALM


def test_metadata_beyond_the_limit_is_said_to_the_layer_above():
    peer = Peer(max_header_list_bytes=2000)
    peer.request()
    peer.request(*FIELDS, ("x-large", "y" * 2000))
    assert [event.head is None for event in peer.events if hasattr(event, "head")] == [False, True]
    assert peer.failure is None


def test_more_streams_than_announced_are_refused_one_by_one():
    peer = Peer(max_streams=2)
    numbers = [peer.request(is_end=True) for _ in range(3)]
    assert peer.resets == [(numbers[2], ErrorCode.REFUSED_STREAM)]
    assert peer.started() == numbers[:2]
    peer.send(frame(RST_STREAM, 0, numbers[0], CANCEL))
    assert peer.request() in peer.started()


def test_answers_that_the_client_does_not_read():
    peer = Peer(max_waiting_frames=50, chores_burst=1e6, min_client_ping_s=1e-9)
    peer.connection.pause()
    for number in range(100):
        peer.now += 1.0
        peer.events += peer.connection.receive(ping(number), peer.now)
        if peer.connection.is_failed:
            break
    assert number == 50
    peer.take()
    assert peer.failure.code is CALM


def test_settings_in_one_frame_are_bounded():
    peer = Peer()
    peer.send(frames.settings(((0x99, 0),) * 65))
    assert peer.failure.code is CALM


def test_what_we_announce():
    peer = Peer(greet=False, max_streams=7, max_header_list_bytes=5000, stream_window_bytes=70_000)
    first, second = peer.take()
    assert dict(frames.read_settings(first.payload)) == {
        settings.HEADER_TABLE_SIZE: 0,
        settings.MAX_CONCURRENT_STREAMS: 7,
        settings.INITIAL_WINDOW_SIZE: 70_000,
        settings.MAX_HEADER_LIST_SIZE: 5000,
    }
    assert (second.kind, second.stream, second.number) == (WINDOW_UPDATE, 0, 4 * 1024 * 1024 - 65_535)
