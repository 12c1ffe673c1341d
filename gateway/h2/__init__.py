"""The fast gRPC listener (`listen.transport: fast`): HTTP/2 and gRPC of our own, made for streams of small messages.

`protocol` is HTTP/2 as a pure state machine: bytes in, events out; commands in, bytes out. `rpc` is gRPC over it, as
pure functions and buffers. `server` brings both onto an asyncio loop and offers the part of `grpc.aio.Server` that
servicers are added with, so the same servicers run on either.
"""
