"""The asyncio edge: connections, calls and a server with the interface of `grpc.aio.Server`, as far as it is used."""

from gateway.h2.server.server import Server

__all__ = ["Server"]
