"""Slowness, silence, age and the end of a connection in order, with a clock that the test moves."""

import pytest

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.frames import (
    ACK,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
)
from gateway.h2.rpc import status
from tests.h2.by_hand import Peer

CALM = ErrorCode.ENHANCE_YOUR_CALM
CANCEL = (8).to_bytes(4)


def ping(number=0):
    return frame(PING, 0, 0, number.to_bytes(8))


class TestTime:
    @pytest.mark.parametrize(
        "said", [b"", frames.PREFACE[:5], frames.PREFACE], ids=["nothing", "a part", "no SETTINGS"]
    )
    def test_a_connection_that_does_not_begin(self, said):
        peer = Peer(greet=False, handshake_timeout_s=10.0)
        peer.send(said)
        peer.check(later_s=9.0)
        assert peer.failure is None
        peer.check(later_s=1.0)
        assert peer.failure.code is ErrorCode.PROTOCOL_ERROR

    def test_settings_that_are_not_acknowledged(self):
        peer = Peer(greet=False, handshake_timeout_s=10.0)
        peer.send(frames.PREFACE, frames.settings(()))
        peer.check(later_s=10.0)
        assert peer.failure.code is ErrorCode.SETTINGS_TIMEOUT

    def test_a_frame_that_does_not_end(self):
        peer = Peer(frame_timeout_s=20.0)
        peer.request()
        whole = frame(DATA, 0, 1, bytes(10))
        peer.send(whole[:12])
        for _ in range(19):
            peer.now += 1.0
            peer.send(b"")
        peer.check(later_s=0.5)
        assert peer.failure is None
        peer.check(later_s=0.5)
        assert peer.failure.code is CALM

    def test_frames_that_arrive_slowly_are_fine(self):
        peer = Peer(frame_timeout_s=20.0)
        peer.request()
        stream = frame(DATA, 0, 1, b"x") * 50
        for at in range(0, len(stream), 7):
            peer.send(stream[at : at + 7])
            peer.check(later_s=9.0)
        assert peer.failure is None

    def test_a_header_block_that_does_not_go_on(self):
        peer = Peer(frame_timeout_s=20.0)
        peer.send(frame(HEADERS, 0, 1, b"\x82"))
        peer.check(later_s=20.0)
        assert peer.failure.code is CALM

    def test_a_stream_that_nobody_reads_is_reset(self):
        peer = Peer(unread_timeout_s=60.0, keepalive_s=1000.0)
        for number in (1, 3, 5):
            peer.request(is_end=True, number=number)
            peer.connection.send_headers(peer.stream(number), status.HEAD)
        peer.send(frame(WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4)))
        for number in (1, 3):
            peer.connection.send_data(peer.stream(number), bytes(100_000))
        peer.connection.send_trailers(peer.stream(1), status.trailers(0, "", b""))
        for _ in range(60):
            peer.check(later_s=1.0)
            peer.send(frame(WINDOW_UPDATE, 0, 3, (10).to_bytes(4)))
        assert not peer.resets
        peer.check(later_s=1.0)
        assert peer.resets == peer.reset_events() == [(1, ErrorCode.CANCEL)]
        for _ in range(59):
            peer.check(later_s=1.0)
        assert not peer.resets[1:]
        peer.check(later_s=1.0)
        assert peer.reset_events()[1:] == [(3, ErrorCode.CANCEL)]
        assert set(peer.connection.streams) == {5}, "nothing waits for this one"

    def test_the_time_to_read_can_change(self):
        peer = Peer(unread_timeout_s=60.0, keepalive_s=1000.0)
        peer.connection.unread_timeout_s = None
        number = peer.request(is_end=True)
        peer.connection.send_headers(peer.stream(number), status.HEAD)
        peer.connection.send_data(peer.stream(number), bytes(100_000))
        for _ in range(5):
            peer.check(later_s=60.0)
        assert not peer.resets
        peer.connection.unread_timeout_s = 10.0
        for _ in range(2):
            peer.check(later_s=10.0)
        assert peer.resets == [(number, ErrorCode.CANCEL)]

    def test_a_client_that_vanished_is_found_by_a_ping(self):
        peer = Peer(keepalive_s=60.0, keepalive_timeout_s=20.0)
        assert not peer.check(later_s=59.0)
        (sent,) = peer.check(later_s=1.0)
        assert (sent.kind, sent.flags) == (PING, 0)
        peer.check(later_s=19.0)
        assert peer.failure is None
        peer.check(later_s=1.0)
        assert peer.failure.code is ErrorCode.NO_ERROR

    def test_a_client_that_answers_is_asked_again_in_time(self):
        peer = Peer(keepalive_s=60.0, keepalive_timeout_s=20.0)
        for count in range(1, 6):
            peer.check(later_s=60.0)
            pings = peer.of(PING)
            assert len(pings) == count
            peer.send(frame(PING, ACK, 0, pings[-1].payload))
        assert peer.failure is None

    def test_a_connection_without_calls_ends_in_order(self):
        peer = Peer(max_idle_s=30.0, keepalive_s=1000.0)
        number = peer.request(is_end=True)
        peer.check(later_s=100.0)
        assert not peer.of(GOAWAY)
        peer.send(frame(RST_STREAM, 0, number, CANCEL))
        for _ in range(30):
            peer.check(later_s=1.0)
        assert not peer.of(GOAWAY)
        peer.check(later_s=1.0)
        assert [each.number for each in peer.of(GOAWAY)] == [ErrorCode.NO_ERROR]

    def test_an_old_connection_ends_in_order_and_then_in_any_case(self):
        peer = Peer(max_age_s=100.0, max_age_grace_s=50.0, keepalive_s=1000.0)
        peer.request(is_end=True)
        peer.check(later_s=99.0)
        assert not peer.of(GOAWAY)
        peer.check(later_s=1.0)
        assert len(peer.of(GOAWAY)) == 1
        peer.check(later_s=49.0)
        assert not peer.connection.is_done
        peer.check(later_s=1.0)
        assert peer.failure.code is ErrorCode.NO_ERROR
        assert peer.reset_events() == [(1, ErrorCode.CANCEL)]


class TestDrain:
    def test_in_two_steps_so_that_no_request_is_lost_between(self):
        peer = Peer()
        peer.request(is_end=True)
        peer.connection.drain(peer.now)
        goaway, asked = peer.take()[-2:]
        assert (goaway.kind, int.from_bytes(goaway.payload[:4]), asked.kind) == (GOAWAY, 2**31 - 1, PING)
        crossed = peer.request(is_end=True)
        assert crossed in peer.started()
        peer.send(frame(PING, ACK, 0, asked.payload))
        assert int.from_bytes(peer.of(GOAWAY)[-1].payload[:4]) == crossed
        late = peer.request(is_end=True)
        assert peer.resets == [(late, ErrorCode.REFUSED_STREAM)]
        assert not peer.connection.is_done
        for number in (1, crossed):
            peer.connection.send_headers(peer.stream(number), status.trailers_only(0, "", b""), is_end=True)
        assert peer.connection.is_done

    def test_without_the_answer_it_goes_on_after_a_second(self):
        peer = Peer()
        peer.connection.drain(peer.now)
        peer.check(later_s=0.5)
        assert not peer.connection.is_done
        peer.check(later_s=0.5)
        assert peer.connection.is_done

    def test_a_connection_that_has_not_begun_is_done_at_once(self):
        peer = Peer(greet=False)
        peer.connection.drain(peer.now)
        assert peer.connection.is_done

    def test_a_response_that_does_not_need_the_rest_of_its_request(self):
        peer = Peer()
        number = peer.request()
        peer.connection.send_headers(peer.stream(number), status.trailers_only(12, "no", b""), is_end=True)
        peer.take()
        assert peer.resets == [(number, ErrorCode.NO_ERROR)]
        assert not peer.connection.streams
        peer.send(frame(DATA, 0, number, b"late"))
        assert peer.failure is None
        assert len(peer.resets) == 1
