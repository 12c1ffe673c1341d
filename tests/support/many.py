"""A GenerateMany stream from both sides: instructions, a reader, and a transport that waits to be let go."""

import asyncio
from typing import Any

import grpc
from google.rpc import error_details_pb2

from gateway.edges import grpc_many
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_request import RequestReader
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import FakeDriver
from tests.support.grpc_edge import generate_request, info_of, make_config, until


def start(request_id: str, **fields: Any) -> gateway_pb2.GenerateManyRequest:
    return gateway_pb2.GenerateManyRequest(start=generate_request(request_id=request_id, **fields))


def abort(request_id: str) -> gateway_pb2.GenerateManyRequest:
    return gateway_pb2.GenerateManyRequest(abort_request_id=request_id)


class Reader:
    """Collects a stream's responses: tokens and finishes per (id, index), errors in order."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: list[tuple[str, int]] = []
        self.errors: list[tuple[str, error_details_pb2.ErrorInfo]] = []
        self.messages = 0

    async def read(self) -> bool:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.messages += 1
        assert message.outputs or message.errors
        for output in message.outputs:
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            if output.HasField("finish"):
                self.finished.append((output.request_id, output.index))
        self.errors += [(error.request_id, info_of(error.status)) for error in message.errors]
        return True

    async def read_until(self, condition: Any) -> None:
        while not condition():
            assert await self.read()

    async def read_all(self) -> None:
        while await self.read():
            pass


class GatedTransport:
    """A call's context whose writes finish when `gate` is set."""

    def __init__(self) -> None:
        self.sent: list[gateway_pb2.GenerateManyResponse] = []
        self.gate = asyncio.Event()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    def accepted(self, stream: Any = None) -> None:
        pass

    async def write(self, message: bytes) -> None:
        self.sent.append(gateway_pb2.GenerateManyResponse.FromString(message))
        await self.gate.wait()


class Stream:
    """A served stream whose instructions are put in one by one; `None` half-closes it."""

    def __init__(self, transport: Any = None) -> None:
        self.driver = FakeDriver()
        self.transport: Any = transport or GatedTransport()
        self.stream = open_stream(self.driver)
        self._instructions: asyncio.Queue[gateway_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self.task = asyncio.create_task(self.stream.serve(self._requests(), self.transport))

    async def _requests(self) -> Any:
        while (instruction := await self._instructions.get()) is not None:
            yield instruction

    def put(self, *instructions: gateway_pb2.GenerateManyRequest | None) -> None:
        for instruction in instructions:
            self._instructions.put_nowait(instruction)


def open_stream(driver: Any) -> grpc_many.ManyStream:
    config = make_config()
    return grpc_many.ManyStream(driver, RequestReader(config), CallGate(config), client_key="s", max_live=9)


async def arrivals(driver: FakeDriver, count: int) -> None:
    await until(lambda: len(driver.requests) >= count)
