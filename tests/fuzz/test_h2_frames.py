"""A small, fixed part of the HTTP/2 frames of `make fuzz`, and that the harness finds what it is for."""

import pytest

from gateway.h2.server.connection import ServerConnection
from tests.conformance.wire import DATA, GOAWAY, frame
from tests.fuzz.h2_frames import check_output, work
from tests.fuzz.h2_source import Source, templates

FRAMES = 3_000


def test_no_frame_breaks_a_promise():
    tally = work([0, 1], FRAMES, "test")
    assert tally.failures == []
    assert 2 * FRAMES <= tally.frames < 2 * FRAMES + 200
    assert tally.connections < tally.frames / 20, "most frames meet a connection that has some behind it"


def test_the_same_seed_makes_the_same_frames():
    def chunks(seed):
        source = Source(seed, templates())
        return [source.opening(), *(source.chunk() for _ in range(50))]

    assert chunks("a") == chunks("a")
    assert chunks("a") != chunks("b")


class TestTheHarnessFinds:
    def test_an_exception_while_reading(self, monkeypatch):
        def receive(connection, data):
            real(connection, data)
            if b"\x04\x01\x00\x00\x00\x00" in data[-40:]:
                raise KeyError("inside")

        real = ServerConnection.data_received
        monkeypatch.setattr(ServerConnection, "data_received", receive)
        assert any("KeyError" in failure for failure in work([0], FRAMES, "test").failures)

    def test_an_exception_in_a_loops_callback(self, monkeypatch):
        def fail(*_):
            raise ZeroDivisionError

        monkeypatch.setattr(ServerConnection, "write_out", fail)
        assert any("ZeroDivisionError" in failure for failure in work([0], FRAMES, "test").failures)

    def test_frames_that_are_cut_short(self, monkeypatch):
        monkeypatch.setattr("gateway.h2.protocol.frames.rst_stream", lambda *_: b"\0\0\4\3\0\0\0\0\1")
        assert any("cut short" in failure for failure in work([0], FRAMES, "test").failures)

    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            (frame(DATA, 0, 1, b"x")[:-1], "cut short"),
            (frame(DATA, 0, 1, bytes(100_000)), "bytes for"),
            (frame(GOAWAY, 0, 0, bytes(8)) + frame(DATA, 0, 1), "closed after a frame of type 0"),
            (b"", "closed after a frame of type -1"),
        ],
    )
    def test_wrong_output(self, data, problem):
        with pytest.raises(AssertionError, match=problem):
            check_output(data, 10, is_closed=True)
