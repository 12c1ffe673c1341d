"""A small asyncio client: many requests over one multiplexed stream.

    async with Client("127.0.0.1:50051") as client:
        generation = await client.start([1, 2, 3], max_tokens=8)
        async for output in generation:
            print(output.token_ids)

It needs `grpc` and `gateway.v1` only; nothing of the gateway itself.
"""

from gateway.client.client import Client
from gateway.client.errors import GenerationError
from gateway.client.generation import Generation

__all__ = ["Client", "Generation", "GenerationError"]
