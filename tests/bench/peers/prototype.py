"""The plainest gateway in Python, as a yardstick: one rank, a queue and protobuf objects per request, grpc.aio.

`prototype PORT HANDSHAKE_PORT`: the engine service on PORT; a rank dials HANDSHAKE_PORT. No limits, metrics or errors.
"""

import asyncio
import contextlib
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import zmq.asyncio
from smg_grpc_proto.generated import vllm_engine_pb2

SERVICE = "vllm.grpc.engine.VllmEngine"
IDENTITY = b"\x00\x00"
ADD, ABORT = b"\x00", b"\x01"
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
FINISHES = {0: "stop", 1: "length"}


class Prototype:
    """The sockets of one rank and the requests on it."""

    def __init__(self, handshake: str, directory: str) -> None:
        context = zmq.asyncio.Context()
        self._handshake = context.socket(zmq.ROUTER)
        self._handshake.bind(handshake)
        self._addresses = [f"ipc://{directory}/in", f"ipc://{directory}/out"]
        self._requests = context.socket(zmq.ROUTER)
        self._requests.bind(self._addresses[0])
        self._outputs = context.socket(zmq.PULL)
        self._outputs.bind(self._addresses[1])
        self._queues: dict[str, asyncio.Queue[list[Any]]] = {}
        self._numbers = itertools.count()

    async def join(self) -> None:
        """Let the rank in."""
        identity, _ = await self._handshake.recv_multipart()
        inputs, outputs = self._addresses
        names = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
        addresses = {"inputs": [inputs], "outputs": [outputs]} | dict.fromkeys(names)
        await self._handshake.send_multipart([identity, encode({"addresses": addresses, "parallel_config": {}})])
        await self._requests.recv_multipart()

    async def run(self) -> None:
        """Hand out what the rank sends."""
        while True:
            rows = decode(await self._outputs.recv())[1]
            for row in rows:
                if (queue := self._queues.get(row[0])) is not None:
                    queue.put_nowait(row)

    async def generate(self, request: Any, _: Any) -> AsyncIterator[Any]:
        """One request, from its message to its last token."""
        wire_id = f"p{next(self._numbers)}"
        queue = self._queues[wire_id] = asyncio.Queue()
        ids = list(request.tokenized.input_ids)
        sampling = {"max_tokens": request.sampling_params.max_tokens, "ignore_eos": True}
        message = [wire_id, ids, None, sampling, None, 0.0, *[None] * 5, 0, 0, 0, None, False, None, None, None, False]
        await self._requests.send_multipart([IDENTITY, ADD, encode(message)])
        tokens: list[int] = []
        try:
            while True:
                row = await queue.get()
                tokens += row[1]
                part = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=row[1], prompt_tokens=len(ids), completion_tokens=len(tokens)
                )
                yield vllm_engine_pb2.GenerateResponse(chunk=part)
                if row[5] is not None:
                    break
            done = vllm_engine_pb2.GenerateComplete(output_ids=tokens, finish_reason=FINISHES.get(row[5], "abort"))
            yield vllm_engine_pb2.GenerateResponse(complete=done)
        finally:
            del self._queues[wire_id]
            if not tokens or row[5] is None:
                await self._requests.send_multipart([IDENTITY, ABORT, encode([wire_id])])


async def serve(port: int, handshake: int) -> None:
    """Serve until ended from outside."""
    with tempfile.TemporaryDirectory(prefix="rankgate-bench-prototype-") as directory:
        gateway = Prototype(f"tcp://127.0.0.1:{handshake}", directory)
        await gateway.join()
        handler = grpc.unary_stream_rpc_method_handler(
            gateway.generate,
            request_deserializer=vllm_engine_pb2.GenerateRequest.FromString,
            response_serializer=vllm_engine_pb2.GenerateResponse.SerializeToString,
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler})])
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await gateway.run()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
