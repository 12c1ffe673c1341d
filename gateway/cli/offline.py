"""`rankgate explain` without a gateway: the same core, fed from a snapshot file.

The snapshot is what `rankgate ranks --json` prints, so a listing of a live gateway can be explained
later; columns that a listing doesn't have can be added by hand.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.config.convert import convert
from gateway.config.document import Document
from gateway.config.fields import Count, TokenId
from gateway.config.schema import Config
from gateway.core.decisions import Decision
from gateway.core.events import RequestArrived
from gateway.core.rank_row import Amount, RankRow
from gateway.core.router import Router
from gateway.types import Sampling

T = TypeVar("T")

_NOW_S = 1e6
"""The core's clock at the snapshot: large enough for any age to lie behind it."""


class ListedRank(RankRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `rankgate ranks --json`: with what is fixed by the configuration or computed from the rest."""

    group: str | None = None
    group_rank: Amount | None = None
    foreign: Amount | None = None
    cost: float | None = None


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The snapshot: ranks that are left out are READY and idle."""

    ranks: tuple[ListedRank, ...]


class RequestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request, with the names of `gateway.v1.GenerateRequest`; a token count may stand for the tokens."""

    prompt_tokens: Count | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    max_tokens: Count | None = None
    data_parallel_rank: int | None = None
    priority: int = 0
    request_id: str = ""
    model: str | None = None


def read_snapshot(text: str, path: Path | str, size: int) -> SnapshotFile:
    """Read a snapshot for `size` ranks. Raises `ConfigError`."""
    document, snapshot = _read(text, path, SnapshotFile)
    seen: set[int] = set()
    for number, row in enumerate(snapshot.ranks):
        place = ("ranks", number, "rank")
        if row.rank >= size:
            raise document.error(place, f"there is no rank {row.rank}; the configuration has 0 to {size - 1}")
        if row.rank in seen:
            raise document.error(place, f"rank {row.rank} is listed twice")
        seen.add(row.rank)
    return snapshot


def read_request(text: str, path: Path | str) -> RequestFile:
    """Read a request. Raises `ConfigError`."""
    document, request = _read(text, path, RequestFile)
    if (request.prompt_tokens is None) == (request.prompt_token_ids is None):
        raise document.error((), "set either 'prompt_tokens' or 'prompt_token_ids'")
    return request


def decide(config: Config, snapshot: SnapshotFile, request: RequestFile) -> Decision:
    """What the gateway would decide. Raises `GatewayError` for a request that it would refuse unseen."""
    router = Router(config, nonce="0" * 16, rng=lambda: 0.0)
    rows = {row.rank: row for row in snapshot.ranks}
    for rank in range(router.ranks.size):
        router.ranks.restore(rows.get(rank) or RankRow(rank=rank), _NOW_S, config.model.max_context_tokens)
    return router.explain(arrive(config, request), _NOW_S)


def arrive(config: Config, request: RequestFile) -> RequestArrived:
    """The request as the core sees it; `max_tokens` defaults to what the context leaves."""
    prompt = request.prompt_token_ids if request.prompt_token_ids is not None else (0,) * (request.prompt_tokens or 1)
    max_tokens = request.max_tokens or max(1, config.model.max_context_tokens - len(prompt))
    return RequestArrived(
        client_key="",
        request_id=request.request_id,
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens),
        model=request.model,
        pinned_rank=request.data_parallel_rank,
        priority=request.priority,
    )


def _read(text: str, path: Path | str, into: type[T]) -> tuple[Document, T]:
    document = Document(text, path)
    if not isinstance(document.data, dict):
        raise document.error((), "expected a mapping")
    return document, convert(document, document.data, into)
