"""Every row of the tables of RFC 9113's errors, over a real socket: the error, its reach, and that all else goes on."""

import pytest

from tests.conformance import rfc_frames, rfc_messages
from tests.conformance.service import serving
from tests.conformance.wire import (
    ACK,
    END_HEADERS,
    GREETING,
    HEADERS,
    PING,
    PREFACE,
    REFUSED_STREAM,
    call,
    call_fields,
    connected,
    encode,
    frame,
    ping,
    rst,
    settings,
)

ROWS = rfc_frames.ROWS + rfc_messages.ROWS
PROBE = 99
"""A stream that no row uses."""


def named(row):
    return f"{row.section}: {row.name}"


@pytest.fixture
async def site():
    async with serving("fast") as site:
        yield site


@pytest.fixture
async def wire(site):
    """A connection in the state that the tables are made for."""
    async with connected(site.address) as wire:
        wire.send(GREETING, frame(HEADERS, END_HEADERS, 1, encode(call_fields("FullDuplexCall"))))
        wire.send(call(3, "Wait"), call(5))
        assert await wire.until(lambda found: found.stream == 5 and found.is_end)
        wire.frames.clear()
        yield wire


def test_the_tables_are_whole():
    names = [named(row) for row in (*rfc_frames.PREFACES, *ROWS, *rfc_frames.FINE)]
    assert len(set(names)) == len(names) >= 160


@pytest.mark.parametrize("row", ROWS, ids=named)
async def test_an_error(wire, row, site):
    wire.send(row.data)
    if row.stream is None:
        assert await wire.end() == row.code
    else:
        assert await wire.until(lambda found: (found.stream, row.code) in wire.resets)
        assert await wire.is_well(PROBE)
        assert set(wire.resets) == {(row.stream, row.code)}
    async with connected(site.address) as other:
        other.send(GREETING)
        assert await other.is_well(1)


@pytest.mark.parametrize("row", rfc_frames.PREFACES, ids=named)
async def test_a_wrong_beginning(site, row):
    async with connected(site.address) as wire:
        wire.send(row.data)
        assert await wire.end() == row.code


@pytest.mark.parametrize("row", rfc_frames.FINE, ids=named)
async def test_what_is_no_error(wire, row):
    wire.send(row.data)
    assert await wire.is_well(PROBE)
    assert not wire.resets
    assert not wire.is_ended


@pytest.mark.parametrize("name", rfc_messages.STATUSES)
async def test_a_request_that_is_answered_with_a_status(wire, name):
    data, expected = rfc_messages.STATUSES[name]
    wire.send(data)
    assert await wire.until(lambda found: found.stream == 7 and found.is_end)
    assert expected.items() <= wire.fields[7].items()
    assert await wire.is_well(PROBE)


async def test_pings_are_answered_with_what_they_brought(wire):
    wire.send(ping(0x0123_4567_89AB_CDEF))
    found = await wire.until(lambda found: found.kind == PING)
    assert (found.flags, found.stream, found.payload) == (ACK, 0, bytes.fromhex("0123456789abcdef"))


async def test_more_streams_than_announced_are_refused_and_may_come_again():
    """RFC 9113, section 5.1.2."""
    async with serving("fast", max_streams=2) as site, connected(site.address) as wire:
        wire.send(GREETING, *(call(number, "Wait") for number in (1, 3, 5)))
        assert await wire.until(lambda _: wire.resets)
        assert wire.resets == [(5, REFUSED_STREAM)]
        wire.send(rst(1))
        assert await wire.is_well(7)


async def test_a_connection_may_come_byte_by_byte(site):
    async with connected(site.address) as wire:
        for byte in PREFACE + settings() + frame(4, ACK) + call(1):
            wire.send(bytes((byte,)))
            await wire.drain()
        assert await wire.until(lambda found: found.stream == 1 and found.is_end)
        assert wire.fields[1]["grpc-status"] == "0"
