"""Another configuration for a bench, in one line."""

from typing import Any

from gateway.core.effects import Effect
from gateway.core.events import Reconfigured
from gateway.core.request import Request
from tests.support.core import Bench, make_config

FAR = {"max_wait_s": None}


def reconfigure(bench: Bench, ranks: int | None = None, **overrides: Any) -> list[Effect]:
    """Put another configuration in force; `Bench.send` checks every invariant right after it."""
    bench.config = make_config(bench.router.ranks.size if ranks is None else ranks, **overrides)
    return bench.send(Reconfigured(bench.config))


def groups(*sizes: int, **settings: Any) -> list[dict[str, Any]]:
    return [
        {"name": f"g{number}", "protocol": "vllm", "handshake": f"tcp://127.0.0.1:{30500 + number}", "ranks": size}
        | settings
        for number, size in enumerate(sizes)
    ]


def finish_all(bench: Bench, requests: list[Request]) -> None:
    """Whatever order they go to ranks in."""
    while waiting := [request for request in requests if not request.is_settled]:
        at_ranks = [request for request in waiting if all(each.attempt is not None for each in request.sequences)]
        assert at_ranks, "nothing goes to any rank"
        bench.finish(at_ranks[0])
    bench.tick(0.1)
    bench.assert_quiet()
