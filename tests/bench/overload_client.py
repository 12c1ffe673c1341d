"""Load for `bench_overload`, as a process of its own: a closed loop, an open one, or a probe.

`python -m tests.bench.overload_client ADDRESS --seconds 10 --settle 1 (--callers 24 | --rates 900,90 | --probe-every-ms 20)`

Prints one JSON object. `--rates` and `--tenants` are lists of the same length. Open loop: arrivals are a Poisson
process whose times do not depend on the answers. What is counted was sent after `--settle` seconds (served requests per
second: ended after them). Messages are not parsed: the client's cost must not hide the gateway's.
"""

import argparse
import asyncio
import collections
import itertools
import json
import random
import time

import grpc
from google.rpc import error_details_pb2, status_pb2

from gateway.edges.grpc_status import STATUS_KEY
from gateway.v1 import gateway_pb2
from tests.bench.client import GENERATE

PROMPT_TOKENS = 32
MAX_TOKENS = (8, 24)
"""Of different lengths: equal ones would run in lockstep, and then all slots of a rank become free at once."""
PROMPTS = 256
CONNECTIONS = 4
GRACE_S = 20.0
"""For what is still running at the end."""


class Run:
    """What the calls did."""

    def __init__(self, options):
        self.options = options
        self.began_at = time.monotonic()
        self.counted_from = self.began_at + options.settle
        self.until = self.began_at + options.seconds
        self.refused = collections.Counter()
        self.unfinished = 0
        self.offered = collections.Counter()
        self.served = collections.Counter(dict.fromkeys(options.tenants.split(","), 0))
        self.served_tokens = 0
        self.with_hint = 0
        self.hints_s = []
        self.times_s = {"ttft": [], "e2e": [], "refusal": [], "lag": []}

    def failed(self, error, took_s):
        """Take note of a refusal."""
        if error.code() is grpc.StatusCode.CANCELLED:
            self.unfinished += 1  # by this client, at its end
            return
        status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ()).get(STATUS_KEY, b""))
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        reason = error.code().name
        for detail in status.details:
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(retry):
                self.with_hint += 1
                self.hints_s.append(retry.retry_delay.ToMicroseconds() / 1e6)
        self.refused[reason] += 1
        self.times_s["refusal"].append(took_s)

    def report(self):
        counted_s = self.until - self.counted_from
        report = {f"{name}_ms": percentiles(times) for name, times in self.times_s.items()}
        return report | {
            "lag_p99_ms": percentiles(self.times_s["lag"]).get("p99", 0.0),
            "counted_s": counted_s,
            "served_per_s": sum(self.served.values()) / counted_s,
            "tokens_per_s": self.served_tokens / counted_s,
            "offered_per_s": sum(self.offered.values()) / counted_s,
            "served_by_tenant": dict(self.served),
            "offered_by_tenant": dict(self.offered),
            "refused": dict(self.refused),
            "unfinished": self.unfinished,
            "refused_with_hint": self.with_hint,
            "hint_s": [min(self.hints_s), max(self.hints_s)] if self.hints_s else [],
        }


def percentiles(times_s):
    """Milliseconds by name; empty without times."""
    ordered = sorted(times_s)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3)
        for name, share in shares.items()
    }


def requests():
    """Serialised requests with prompts of their own, and their tokens; the gateway makes up their ids."""
    source = random.Random(17)
    made = []
    for _ in range(PROMPTS):
        tokens = source.randint(*MAX_TOKENS)
        prompt = [source.randrange(30_000) for _ in range(PROMPT_TOKENS)]
        sampling = gateway_pb2.Sampling(max_tokens=tokens, ignore_eos=True)
        request = gateway_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
        made.append((request.SerializeToString(), tokens))
    return made


async def one(call, request, run, tenant=""):
    """One request to its end."""
    data, tokens = request
    sent_at = time.monotonic()
    is_counted = run.counted_from <= sent_at < run.until
    if is_counted:
        run.offered[tenant] += 1
    first_at = None
    try:
        async for _ in call(data, metadata=(("x-tenant-id", tenant),) if tenant else None):
            first_at = first_at or time.monotonic()
    except grpc.aio.AioRpcError as error:
        if is_counted:
            run.failed(error, time.monotonic() - sent_at)
        return
    now = time.monotonic()
    if run.counted_from <= now < run.until:
        run.served[tenant] += 1
        run.served_tokens += tokens
    if is_counted:
        run.times_s["ttft"].append(first_at - sent_at)
        run.times_s["e2e"].append(now - sent_at)


async def closed_loop(calls, data, run, callers):
    """Each caller sends its next request when the last one has ended."""

    numbers = itertools.count()

    async def caller(number):
        while time.monotonic() < run.until:
            await one(calls[number % len(calls)], data[next(numbers) % len(data)], run)

    await asyncio.gather(*(caller(number) for number in range(callers)))


async def open_loop(calls, data, run, rates, tenants):
    """Requests at their times, whatever became of the earlier ones."""
    source = random.Random(23)
    rate = sum(rates)
    live = set()
    due_at, number = run.began_at, 0
    while (due_at := due_at + source.expovariate(rate)) < run.until:
        delay_s = due_at - time.monotonic()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        elif number % 16 == 0:
            await asyncio.sleep(0)
        run.times_s["lag"].append(max(0.0, time.monotonic() - due_at))
        (tenant,) = source.choices(tenants, rates)
        number += 1
        task = asyncio.create_task(one(calls[number % len(calls)], data[number % len(data)], run, tenant))
        live.add(task)
        task.add_done_callback(live.discard)
    if live:
        await asyncio.wait(live, timeout=GRACE_S)


async def probe(calls, run, every_s):
    """One request at a time on the only connection, for more sequences than there is ever room: always refused."""
    sampling = gateway_pb2.Sampling(max_tokens=MAX_TOKENS[0], n=64)
    data = gateway_pb2.GenerateRequest(prompt_token_ids=range(PROMPT_TOKENS), sampling=sampling).SerializeToString()
    while (began_at := time.monotonic()) < run.until:
        await one(calls[0], (data, 0), run)
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_at)))


async def main(options):
    count = 1 if options.probe_every_ms else CONNECTIONS
    unshared = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(options.address, options=unshared) for _ in range(count)]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    calls, data = [channel.unary_stream(GENERATE) for channel in channels], requests()
    run = Run(options)
    if options.callers:
        await closed_loop(calls, data, run, options.callers)
    elif options.probe_every_ms:
        await probe(calls, run, options.probe_every_ms / 1e3)
    else:
        rates = [float(rate) for rate in options.rates.split(",")]
        await open_loop(calls, data, run, rates, options.tenants.split(","))
    for channel in channels:
        await channel.close()
    print(json.dumps(run.report()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--settle", type=float, default=1.0)
    parser.add_argument("--callers", type=int, default=0)
    parser.add_argument("--rates", default="")
    parser.add_argument("--tenants", default="")
    parser.add_argument("--probe-every-ms", type=float, default=0.0)
    asyncio.run(main(parser.parse_args()))
