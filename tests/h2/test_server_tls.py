"""The server over TLS."""

import asyncio
import contextlib
import ssl

import grpc
import pytest
import trustme

from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from tests.h2.site import MIB, Handlers


class TestTls:
    @pytest.fixture
    def authority(self):
        return trustme.CA()

    @contextlib.asynccontextmanager
    async def secured(self, authority, **limits):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2"])
        authority.issue_cert("localhost").configure_cert(context)
        handlers = Handlers()
        server = Server(limits=Limits(**limits), max_message_bytes=MIB)
        server.add_registered_method_handlers("t.S", handlers.service())
        port = server.add_secure_port("127.0.0.1:0", lambda: context)
        await server.start()
        yield port
        shared = server._shared
        await server.stop(None)
        assert not shared.connections

    async def echo(self, authority, port):
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            return await channel.unary_unary("/t.S/Echo")(b"sealed")

    async def test_calls_and_large_ones(self, authority):
        async with self.secured(authority) as port:
            assert await self.echo(authority, port) == b"sealed"
            credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                call = channel.unary_stream("/t.S/Stream")(b"2000")
                assert [each async for each in call] == [b"%d" % number for number in range(2000)]

    async def test_those_that_do_not_shake_hands_hold_up_nobody_and_are_closed(self, authority):
        async with self.secured(authority, handshake_timeout_s=1.0) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            silent[0][1].write(b"GET / HTTP/1.1\r\n\r\n")
            assert await self.echo(authority, port) == b"sealed"
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()

    @pytest.mark.parametrize("protocols", [[], ["http/1.1"]], ids=["none", "another"])
    async def test_a_client_that_does_not_agree_on_http2_is_closed(self, authority, protocols):
        async with self.secured(authority) as port:
            context = ssl.create_default_context()
            authority.configure_trust(context)
            if protocols:
                context.set_alpn_protocols(protocols)
            reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert await self.echo(authority, port) == b"sealed"

    async def test_a_stop_breaks_off_handshakes(self, authority):
        async with self.secured(authority, handshake_timeout_s=60.0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
