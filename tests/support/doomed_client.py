"""A client process for tests that kill it: `python -m tests.support.doomed_client HOST:PORT`.

Opens Generate calls and one GenerateMany stream, says `streaming` once tokens flow on all of them, and reads on.
"""

import asyncio
import sys

import grpc

from gateway.v1 import gateway_pb2_grpc
from tests.support.calls import Generation, Many, make_prompt, make_request

CALLS = 8
MANY = 8


async def main(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        client = gateway_pb2_grpc.GatewayServiceStub(channel)
        calls = [Generation(client, make_request(make_prompt(4, number), 10_000)) for number in range(CALLS)]
        many = Many(client)
        requests = [make_request(make_prompt(5, number), 10_000) for number in range(MANY)]
        for request in requests:
            many.start(request)
        for call in calls:
            await call.first_token()
        for request in requests:
            await many.outcome(request.request_id).progress.wait()
        sys.stdout.write("streaming\n")
        sys.stdout.flush()
        await asyncio.gather(many.task, *(call.task for call in calls))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
