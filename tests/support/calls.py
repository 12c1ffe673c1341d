"""Clients for whole-gateway tests: they collect everything that a request gave."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from gateway.core.errors import Reason
from gateway.edges.grpc_status import STATUS_KEY
from gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.engine_edge import PROTOS
from tests.support.grpc_edge import info_of
from tests.support.stack import VOCAB_SIZE, expected

_names = itertools.count(1)


def make_prompt(length: int, number: int = 0) -> list[int]:
    """A reproducible prompt; other numbers give other prompts."""
    source = random.Random(f"{length}-{number}")
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def make_request(prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> gateway_pb2.GenerateRequest:
    """`sampling` are further sampling fields, the rest are the request's."""
    sampling = gateway_pb2.Sampling(max_tokens=max_tokens, **fields.pop("sampling", {}))
    return gateway_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling, **fields)


def engine_request(
    protocol: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, *, stream: bool = True, **fields: Any
) -> Any:
    """The same for the family's standard engine service."""
    pb = PROTOS[protocol]
    sampling = {"max_tokens" if protocol == "vllm" else "max_new_tokens": max_tokens} | fields.pop("sampling", {})
    fields.setdefault("request_id", f"engine-{next(_names)}")
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
        **fields,
    )


class Outcome:
    """All that came back for one request: per sequence its tokens, logprobs and finish; and how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[gateway_pb2.TokenLogprob]] = {}
        self.finishes: dict[int, gateway_pb2.Finish] = {}
        self.messages = 0
        self.status: status_pb2.Status | None = None
        self.trailing: dict[str, str | bytes] = {}
        self.progress = asyncio.Event()

    def add(self, response: gateway_pb2.GenerateResponse) -> None:
        index = response.index
        assert index not in self.finishes, "output after the sequence's finish"
        self.messages += 1
        self.tokens.setdefault(index, []).extend(response.token_ids)
        self.logprobs.setdefault(index, []).extend(response.logprobs)
        if response.HasField("finish"):
            self.finishes[index] = response.finish
        self.progress.set()

    @property
    def text(self) -> list[int]:
        """The tokens of the only sequence."""
        assert set(self.tokens) <= {0}
        return self.tokens.get(0, [])

    @property
    def finish(self) -> gateway_pb2.Finish:
        """The finish of the only sequence."""
        (finish,) = self.finishes.values()
        return finish

    @property
    def code(self) -> grpc.StatusCode:
        number = 0 if self.status is None else self.status.code
        return next(code for code in grpc.StatusCode if code.value[0] == number)

    @property
    def reason(self) -> Reason | None:
        """None on success, and when the client's own library ended the call."""
        return Reason(info_of(self.status).reason) if self.status is not None and self.status.details else None

    @property
    def facts(self) -> dict[str, str]:
        assert self.status is not None
        return dict(info_of(self.status).metadata)

    @property
    def retry_after_s(self) -> float | None:
        assert self.status is not None
        retry = error_details_pb2.RetryInfo()
        found = any(detail.Unpack(retry) for detail in self.status.details)
        return retry.retry_delay.ToMicroseconds() / 1e6 if found else None

    def assert_complete(self, request: gateway_pb2.GenerateRequest) -> None:
        """Every byte of every sequence, one finish each, usage that agrees."""
        assert self.status is None, self.status
        prompt, sampling = request.prompt_token_ids, request.sampling
        n = sampling.n if sampling.HasField("n") else 1
        for index in range(n):
            seed = sampling.seed + index if sampling.HasField("seed") else None
            assert self.tokens[index] == expected(prompt, sampling.max_tokens, seed)
        assert set(self.finishes) == set(range(n))
        for finish in self.finishes.values():
            assert finish.reason == gateway_pb2.FINISH_REASON_LENGTH
            assert (finish.prompt_tokens, finish.completion_tokens) == (len(prompt), sampling.max_tokens)

    def assert_prefix(self, request: gateway_pb2.GenerateRequest) -> None:
        """It ended with an error, after exactly the tokens that were generated first, without a made-up finish."""
        assert self.status is not None
        assert not self.finishes
        for tokens in self.tokens.values():
            assert tokens == expected(request.prompt_token_ids, len(tokens))


class Generation:
    """A running Generate call. `outcome` grows while it runs; `done` waits for its end."""

    def __init__(
        self, stub: "gateway_pb2_grpc.GatewayServiceAsyncStub", request: gateway_pb2.GenerateRequest, **options: Any
    ) -> None:
        self.request = request
        self.outcome = Outcome()
        self.call = stub.Generate(request, **options)
        self.task = asyncio.create_task(self._read())

    async def first_token(self) -> None:
        """Wait until something has come."""
        await self.outcome.progress.wait()

    async def done(self) -> Outcome:
        """Its end. A waiter that is cancelled leaves the call alone."""
        await asyncio.shield(self.task)
        return self.outcome

    async def _read(self) -> None:
        try:
            while (response := await self.call.read()) is not grpc.aio.EOF:
                self.outcome.add(response)
        except grpc.aio.AioRpcError as error:
            self.outcome.status = status_of(error)
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
            self.outcome.status = status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0])
        else:
            self.outcome.trailing = dict(await self.call.trailing_metadata())


async def generate(
    stub: "gateway_pb2_grpc.GatewayServiceAsyncStub", request: gateway_pb2.GenerateRequest, **options: Any
) -> Outcome:
    """Run one Generate call to its end."""
    return await Generation(stub, request, **options).done()


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The status with its details, where the server sent any."""
    details = dict(error.trailing_metadata() or ()).get(STATUS_KEY)
    if details is not None:
        return status_pb2.Status.FromString(details)
    return status_pb2.Status(code=error.code().value[0], message=error.details() or "")


class Many:
    """A GenerateMany stream that many tasks share. A paused one reads nothing before `go_on`."""

    def __init__(
        self, stub: "gateway_pb2_grpc.GatewayServiceAsyncStub", *, paused: bool = False, **options: Any
    ) -> None:
        self._may_read = asyncio.Event()
        if not paused:
            self._may_read.set()
        self._instructions: asyncio.Queue[gateway_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._waiting: dict[str, tuple[Outcome, asyncio.Future[Outcome], int]] = {}
        self.call = stub.GenerateMany(self._outgoing(), **options)
        self.task = asyncio.create_task(self._read())

    def start(self, request: gateway_pb2.GenerateRequest) -> "asyncio.Future[Outcome]":
        """Send a request under an id of its own, unless it has one; the future gives its outcome."""
        if not request.request_id:
            request.request_id = f"many-{next(_names)}"
        n = request.sampling.n if request.sampling.HasField("n") else 1
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (Outcome(), future, n)
        self._instructions.put_nowait(gateway_pb2.GenerateManyRequest(start=request))
        return future

    def outcome(self, request_id: str) -> Outcome:
        """What a running request has so far."""
        return self._waiting[request_id][0]

    def adopt(self, request_id: str, outcome: Outcome, future: "asyncio.Future[Outcome]") -> None:
        """Follow a running request again whose id another one has taken over meanwhile."""
        self._waiting[request_id] = (outcome, future, 1)

    def abort(self, request_id: str) -> None:
        self._instructions.put_nowait(gateway_pb2.GenerateManyRequest(abort_request_id=request_id))

    def go_on(self) -> None:
        self._may_read.set()

    def half_close(self) -> None:
        self._instructions.put_nowait(None)

    async def end(self) -> None:
        """Half-close and wait for the stream's OK."""
        self.half_close()
        await self.task
        assert not self._waiting

    async def _outgoing(self) -> AsyncIterator[gateway_pb2.GenerateManyRequest]:
        while (instruction := await self._instructions.get()) is not None:
            yield instruction

    async def _read(self) -> None:
        await self._may_read.wait()
        while (response := await self.call.read()) is not grpc.aio.EOF:
            for output in response.outputs:
                outcome, _, n = self._waiting[output.request_id]
                outcome.add(output)
                if len(outcome.finishes) == n:
                    self._settle(output.request_id)
            for error in response.errors:
                self._waiting[error.request_id][0].status = error.status
                self._settle(error.request_id)

    def _settle(self, request_id: str) -> None:
        outcome, future, _ = self._waiting.pop(request_id)
        if not future.done():
            future.set_result(outcome)


@asynccontextmanager
async def many_stream(stub: "gateway_pb2_grpc.GatewayServiceAsyncStub") -> AsyncIterator[Many]:
    """A stream that is half-closed at the end of the block and must then end with OK."""
    many = Many(stub)
    yield many
    await many.end()
