"""Runs the demo: exit 0 when every request came back whole."""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import grpc

from engine_stub.tokens import expected_tokens
from gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tools.demo.replay import Replay, load_trace, repeated_prompts
from tools.demo.report import LiveTable, fetch_metrics, next_steps, summary
from tools.demo.stack import RANKS, VOCAB_SIZE, Stack

_REFRESH_TTY_S = 0.5
_REFRESH_LOG_S = 4.0


async def _wait_ready(stack: Stack, stub: "gateway_pb2_grpc.GatewayServiceAsyncStub") -> None:
    deadline = stack.deadline()
    while True:
        stack.check()
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await stub.ListRanks(gateway_pb2.ListRanksRequest(), timeout=1.0)
            if sum(rank.state == gateway_pb2.RANK_STATE_READY for rank in answer.ranks) == RANKS:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks did not join in time; logs are in {stack.directory}")
        await asyncio.sleep(0.05)


async def _show(stub: "gateway_pb2_grpc.GatewayServiceAsyncStub", replay: Replay, stack: Stack) -> None:
    table = LiveTable()
    pause_s = _REFRESH_TTY_S if sys.stdout.isatty() else _REFRESH_LOG_S
    while True:
        await asyncio.sleep(pause_s)
        stack.check()
        answer = await stub.ListRanks(gateway_pb2.ListRanksRequest(), timeout=5.0)
        table.draw(list(answer.ranks), replay)


def _replay(address: str, backend: str, duration_s: float, requests: int | None) -> Replay:
    """The trace where tokens cost nothing; short prompts, repeated, where every token is computed here."""
    if backend == "synthetic":
        expected = partial(expected_tokens, sampling_seed=None, vocab_size=VOCAB_SIZE)
        return Replay(
            address, load_trace(duration_s, requests), VOCAB_SIZE, lambda prompt, n: expected(prompt, count=n)
        )
    return Replay(address, repeated_prompts(duration_s, requests or 48), VOCAB_SIZE, None)


async def _run(stack: Stack, replay: Replay, *, keep: bool) -> int:
    address = f"127.0.0.1:{stack.ports.grpc}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await _wait_ready(stack, stub)
        print(f"gateway on {address}, {RANKS} ranks READY; sending {len(replay.jobs)} requests", flush=True)
        show = asyncio.create_task(_show(stub, replay, stack))
        begin = time.monotonic()
        try:
            await replay.run()
        finally:
            show.cancel()
            await asyncio.gather(show, return_exceptions=True)
        text = await asyncio.to_thread(fetch_metrics, stack.ports)
        print("\n" + "\n".join(summary(replay.results, time.monotonic() - begin, text)))
        print("\n".join(["", *_closing(stack, keep=keep)]), flush=True)
        while keep:
            await asyncio.sleep(1.0)
            stack.check()
    return int(any(result.error is not None for result in replay.results))


def _closing(stack: Stack, *, keep: bool) -> list[str]:
    """What to do next. Commands only where what they ask is still there."""
    if not keep:
        return ["all of it is stopped now; `make demo KEEP=1` keeps it up and prints commands to try"]
    return ["it stays up until Ctrl-C; try:", *(f"  {line}" for line in next_steps(stack.ports))]


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="stay up after the replay")
    parser.add_argument("--protocol", choices=("tokenspeed", "vllm"), default="tokenspeed")
    parser.add_argument("--backend", default="synthetic", help="engine backend of the ranks")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the arrivals take")
    parser.add_argument("--requests", type=_count, help="how many of the traced requests; without it all of them")
    options = parser.parse_args()
    # `kill` and Ctrl-C end it in the same way: with its processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="rankgate-demo-") as directory,
        Stack(Path(directory), options.protocol, options.backend) as stack,
    ):
        try:
            address = f"127.0.0.1:{stack.ports.grpc}"
            replay = _replay(address, options.backend, options.seconds, options.requests)
            return asyncio.run(_run(stack, replay, keep=options.keep))
        except KeyboardInterrupt:
            return 0
        except RuntimeError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
