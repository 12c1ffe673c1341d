"""Closed-loop load client for the benchmarks, as a process of its own.

`python -m tests.bench.client ADDRESS METHOD --conns 8 --streams 32 --tokens 64 --total 3000 --warmup 500`

METHOD is `engine` (vllm.grpc.engine.VllmEngine/Generate, which peers serve too), `generate` or `many`
(gateway.v1). Prints WARM on stderr when the warm-up is over and one JSON object at the end. Messages are not
parsed beyond their count: the client's cost must not hide the gateway's.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time

import grpc

from gateway.v1 import gateway_pb2

ENGINE = "/vllm.grpc.engine.VllmEngine/Generate"
GENERATE = "/gateway.v1.GatewayService/Generate"
MANY = "/gateway.v1.GatewayService/GenerateMany"


class Run:
    """Counts what the streams do; the first `warmup` requests only warm up."""

    def __init__(self, total, warmup):
        self.numbers = itertools.count(1)
        self.total = total + warmup
        self.warmup = warmup
        self.done = 0
        self.errors = 0
        self.messages = 0
        self.ttft_s = []
        self.gaps_s = []
        self.began_at = time.monotonic()
        self.is_warm = warmup == 0

    def next_number(self):
        number = next(self.numbers)
        return number if number <= self.total else None

    def finished(self):
        self.done += 1
        if not self.is_warm and self.done >= self.warmup:
            self.is_warm = True
            self.began_at = time.monotonic()
            self.messages = 0
            print("WARM", file=sys.stderr, flush=True)

    def report(self, tokens):
        elapsed = time.monotonic() - self.began_at
        done = self.done - self.warmup
        return {
            "done": done,
            "errors": self.errors,
            "elapsed_s": elapsed,
            "tokens_per_s": done * tokens / elapsed,
            "messages": self.messages,
            "ttft_p50_ms": pick(self.ttft_s, 0.5),
            "ttft_p99_ms": pick(self.ttft_s, 0.99),
            "gap_p99_ms": pick(self.gaps_s, 0.99),
        }


def pick(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else None


def engine_request(number, prompt, tokens):
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    request = pb.GenerateRequest(
        request_id=f"b{number}", tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=sampling, stream=True
    )
    return request.SerializeToString()


def gateway_request(number, prompt, tokens):
    sampling = gateway_pb2.Sampling(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    return gateway_pb2.GenerateRequest(request_id=f"b{number}", prompt_token_ids=prompt, sampling=sampling)


async def one_stream(call, make, run, prompt, tokens):
    while (number := run.next_number()) is not None:
        sent_at = last_at = time.monotonic()
        first = True
        try:
            async for _ in call(make(number, prompt, tokens)):
                now = time.monotonic()
                run.messages += 1
                if run.is_warm:
                    (run.ttft_s if first else run.gaps_s).append(now - last_at)
                first, last_at = False, now
        except grpc.aio.AioRpcError as error:
            run.errors += 1
            print(error.code(), error.details(), time.monotonic() - sent_at, file=sys.stderr)
        run.finished()


async def one_many(channel, run, streams, prompt, tokens):
    """One GenerateMany stream that keeps `streams` requests live."""
    call = channel.stream_stream(
        MANY,
        request_serializer=gateway_pb2.GenerateManyRequest.SerializeToString,
        response_deserializer=gateway_pb2.GenerateManyResponse.FromString,
    )()
    live = 0

    async def start():
        nonlocal live
        number = run.next_number()
        if number is not None:
            live += 1
            await call.write(gateway_pb2.GenerateManyRequest(start=gateway_request(number, prompt, tokens)))

    for _ in range(streams):
        await start()
    while live:
        answer = await call.read()
        run.messages += 1
        ended = sum(1 for output in answer.outputs if output.HasField("finish")) + len(answer.errors)
        run.errors += len(answer.errors)
        for _ in range(ended):
            live -= 1
            run.finished()
            await start()
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


async def main(options):
    run = Run(options.total, options.warmup)
    prompt = [(7 * index) % 4096 for index in range(options.prompt_tokens)]
    limits = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(options.address, options=limits) for _ in range(options.conns)]
    async with asyncio.TaskGroup() as tasks:
        for channel in channels:
            if options.method == "many":
                tasks.create_task(one_many(channel, run, options.streams, prompt, options.tokens))
                continue
            if options.method == "engine":
                call, make = channel.unary_stream(ENGINE), engine_request
            else:
                serialise = gateway_pb2.GenerateRequest.SerializeToString
                call, make = channel.unary_stream(GENERATE, request_serializer=serialise), gateway_request
            for _ in range(options.streams):
                tasks.create_task(one_stream(call, make, run, prompt, options.tokens))
    for channel in channels:
        await channel.close()
    print(json.dumps(run.report(options.tokens)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("method", choices=("engine", "generate", "many"))
    for name, default in (
        ("conns", 8),
        ("streams", 32),
        ("tokens", 64),
        ("prompt-tokens", 16),
        ("total", 1000),
        ("warmup", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(main(parser.parse_args()))
