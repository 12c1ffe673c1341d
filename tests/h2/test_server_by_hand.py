"""Calls that the gRPC library's client would not make."""

import asyncio

import pytest
from hpack import Decoder

from gateway.h2.protocol import frames
from gateway.h2.protocol.header_blocks import encode_fields
from tests.h2.by_hand import FIELDS, message
from tests.h2.site import MIB, serving
from tests.support.grpc_edge import until


class TestByHand:
    """What the library's client would not send."""

    async def exchange(self, site, *data, path="/t.S/Echo", fields=()):
        """Send on stream 1 and return the fields of its response's last header block."""
        reader, writer = await asyncio.open_connection(*site.address.split(":"))
        plain = [(name.encode(), value.encode()) for name, value in FIELDS if name not in {":path", *dict(fields)}]
        pseudo = [pair for pair in ((":path", path), *fields) if pair[0].startswith(":")]
        rest = [pair for pair in fields if not pair[0].startswith(":")]
        more = [(name.encode(), value.encode()) for name, value in rest if value]
        block = encode_fields([*((name.encode(), value.encode()) for name, value in pseudo), *plain, *more])
        writer.write(frames.PREFACE + frames.settings(()) + frames.SETTINGS_ACK)
        writer.write(frames.headers(1, block, is_end=not data) + b"".join(data))
        decoder = Decoder()
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == frames.HEADERS:
                found = dict(decoder.decode(payload))
                if head[4] & frames.END_STREAM:
                    writer.close()
                    return found

    def data(self, payload, *, is_end=True):
        return frames.frame(frames.DATA, frames.END_STREAM if is_end else 0, 1, payload)

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ((message(b"a"),), "0"),
            ((message(b"a")[:3], message(b"a")[3:], b""), "0"),
            ((message(b"a") * 2,), "13"),
            ((message(b"abc")[:-1],), "13"),
            ((b"",), "13"),
            ((b"\x01\0\0\0\x01a",), "13"),
            ((b"\0\xff\xff\xff\xff",), "8"),
        ],
        ids=["one", "in pieces", "two", "cut short", "none", "compressed without saying so", "4 GiB"],
    )
    async def test_bodies(self, site, body, code):
        parts = [self.data(part, is_end=part is body[-1]) for part in body]
        found = await self.exchange(site, *parts)
        assert found["grpc-status"] == code
        assert len(site.handlers.contexts) == (code == "0")

    async def test_no_body_at_all(self, site):
        assert (await self.exchange(site))["grpc-status"] == "13"

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ([(":method", "GET")], {":status": "405", "allow": "POST"}),
            ([("content-type", "application/json")], {":status": "415"}),
            ([("te", "")], {":status": "400"}),
            (
                [("grpc-encoding", "br")],
                {":status": "200", "grpc-status": "12", "grpc-accept-encoding": "identity,gzip"},
            ),
            ([("grpc-timeout", "soon")], {":status": "200", "grpc-status": "13"}),
            ([("x-bin", "not base64!")], {":status": "200", "grpc-status": "13"}),
            ([("x-large", "y" * 20_000)], {":status": "200", "grpc-status": "8"}),
        ],
        ids=["method", "content-type", "te", "encoding", "timeout", "binary metadata", "too much metadata"],
    )
    async def test_heads(self, site, fields, expected):
        found = await self.exchange(site, self.data(message(b"a")), fields=fields)
        assert expected.items() <= found.items()
        assert not site.handlers.contexts

    async def test_a_late_refusal_comes_although_the_client_does_not_end(self, site):
        found = await self.exchange(site, self.data(message(b"a"), is_end=False), path="/t.S/None")
        assert found["grpc-status"] == "12"

    async def test_incomplete_messages_are_bounded_for_the_connection(self):
        async with serving(max_request_bytes=MIB, stream_window_bytes=2 * MIB) as site:
            reader, writer = await asyncio.open_connection(*site.address.split(":"))
            fields = [(name.encode(), value.encode()) for name, value in FIELDS if name != ":path"]
            block = encode_fields([(b":path", b"/t.S/Echo"), *fields])
            writer.write(frames.PREFACE + frames.settings(()) + frames.SETTINGS_ACK)
            almost = message(bytes(MIB))[:-1]
            for number in range(1, 60, 2):
                writer.write(frames.headers(number, block, is_end=False))
                for at in range(0, len(almost), 16_384):
                    writer.write(frames.frame(frames.DATA, 0, number, almost[at : at + 16_384]))
                await asyncio.wait_for(writer.drain(), 10)
            (connection,) = site.shared.connections
            await until(lambda: connection.http.inbound.last_stream_id == 59)
            assert connection._partial_bytes <= 17 * MIB
            await until(lambda: len(connection.http.streams) <= 17)
            assert len(connection.http.streams) >= 15, "the first ones are still waited for"
            writer.transport.abort()
            await until(lambda: not site.shared.connections)
            assert connection._partial_bytes == 0
            del reader
