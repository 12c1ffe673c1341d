"""For ranks that don't step by themselves: hold requests there, and send batches of the test's making."""

from collections.abc import Sequence

from engine_stub.engine import ScriptedRow
from engine_stub.wire.codec import Load
from tests.support.calls import Generation, make_request
from tests.support.stack import Stack, until


async def held(stack: Stack, rank: int | None, max_tokens: int = 100) -> tuple[Generation, str]:
    """A Generate call that has reached its rank (pinned, unless None), and its id there."""
    before = {wire_id for each in stack.ranks for wire_id in each.live_ids}
    generation = Generation(stack.client(), make_request(max_tokens=max_tokens, data_parallel_rank=rank))

    def arrived() -> set[str]:
        return {wire_id for each in stack.ranks for wire_id in each.live_ids} - before

    await until(arrived, "the request to reach a rank")
    (wire_id,) = arrived()
    return generation, wire_id


async def report(stack: Stack, rank: int, rows: Sequence[ScriptedRow], load: Load | None) -> None:
    """Send one batch and wait until the core has handled it."""
    batches = stack.router.counters.batches
    seen = batches[rank]
    stack.ranks[rank].send_rows(rows, load)
    await until(lambda: batches[rank] > seen, "the batch to arrive")
