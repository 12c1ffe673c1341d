"""A gRPC server with nothing behind it, for proxies: our own transport and a trivial handler. `upstream PORT`."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from smg_grpc_proto.generated import vllm_engine_pb2

from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from tests.bench.peers.scripts import Pace

SERVICE = "vllm.grpc.engine.VllmEngine"


def chunk(token: int) -> bytes:
    """One token as the service's message."""
    part = vllm_engine_pb2.GenerateStreamChunk(token_ids=[token], prompt_tokens=16, completion_tokens=1)
    message: bytes = vllm_engine_pb2.GenerateResponse(chunk=part).SerializeToString()
    return message


async def serve(port: int) -> None:
    """Answer until the commands end."""
    pace = Pace()
    chunks = [chunk(100 + 7 * index) for index in range(64)]

    async def generate(request: bytes, _: Any) -> AsyncIterator[bytes]:
        tokens = vllm_engine_pb2.GenerateRequest.FromString(request).sampling_params.max_tokens
        for index in range(tokens):
            await pace.row()
            yield chunks[index % 64]
        done = vllm_engine_pb2.GenerateComplete(output_ids=[1] * tokens, finish_reason="length")
        yield vllm_engine_pb2.GenerateResponse(complete=done).SerializeToString()

    server = Server(limits=Limits(max_streams=16384), max_message_bytes=1 << 24)
    handler: Any = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler})])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("READY", flush=True)
    await pace.run()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
