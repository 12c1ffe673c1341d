"""A model behind the scheduler's seam: a plan's items -> one fused forward -> tokens by sampling."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine_stub.backend import BackendInfo
from engine_stub.config import StubConfig
from engine_stub.model import sampling
from engine_stub.model.exact import ExactModel, ExactWeights
from engine_stub.model.fixed import Floats
from engine_stub.model.shape import Shape
from engine_stub.scheduler.plan import ForwardOutput, StepItem, StepPlan, TopLogprobs


class LogitRows(Protocol):
    """Logits of a step on their device: one row per item that needs a token, in the order of the items."""

    def row(self, index: int) -> Floats:
        """Real values of one row on the host, as a copy."""
        ...

    def ban(self, row: int | None, ids: Sequence[int]) -> None:
        """Make ids of a row (None: of every row) the worst choice."""
        ...

    def best(self) -> list[int]:
        """The largest logit of each row, the lowest id of equals."""
        ...


class Model(Protocol):
    """A model with its K/V pool."""

    def forward(self, items: Sequence[StepItem]) -> LogitRows:
        """Store the K and V of all items, then compute the rows that are wanted. The only call of a model."""
        ...


class KernelBackend:
    """See `engine_stub.backend.Backend`. `excluded` ids are never generated."""

    def __init__(self, info: BackendInfo, model: Model, excluded: Sequence[int] = ()) -> None:
        self.name = info.name
        self.info = info
        self.model = model
        self.calls = 0
        """Forward calls so far: one per step, however many sequences run."""
        self._excluded = tuple(excluded)

    def forward(self, plan: StepPlan) -> ForwardOutput:
        """See `Backend.forward`. The step takes the time that it takes: `duration_ms` is 0."""
        items = plan.items()
        logits = self.model.forward(items)
        self.calls += 1
        tokens, logprobs = self._choose(items, logits)
        return ForwardOutput.of_items(plan, tokens, logprobs)

    def _choose(
        self, items: list[StepItem], logits: LogitRows
    ) -> tuple[list[int | None], list[TopLogprobs | None] | None]:
        """Special rows on the host, one by one; all others by one pass over the device's rows."""
        wanting = [index for index, item in enumerate(items) if item.needs_token]
        tokens: list[int | None] = [None] * len(items)
        logprobs: list[TopLogprobs | None] = [None] * len(items)
        plain: list[tuple[int, int]] = []
        for row, index in enumerate(wanting):
            item = items[index]
            if sampling.is_plain(item):
                plain.append((row, index))
            else:
                tokens[index], logprobs[index] = sampling.choose(logits.row(row), item, self._excluded)
        if plain:
            if self._excluded:
                logits.ban(None, self._excluded)
            for row, index in plain:
                if items[index].banned_ids:
                    logits.ban(row, sorted(items[index].banned_ids))
            best = logits.best()
            for row, index in plain:
                tokens[index] = best[row]
        has_logprobs = any(item.logprobs is not None for item in items)
        return tokens, logprobs if has_logprobs else None


EXACT_REVISION = 1
"""Goes up with every change of the exact arithmetic that changes a bit."""


def exact_backend(name: str, config: StubConfig, weights: ExactWeights) -> KernelBackend:
    """The exact model with a K/V pool as the scheduler is configured; raises `ModelError`."""
    scheduler, excluded = config.scheduler, config.model.never_emitted
    model = ExactModel(
        weights, blocks=scheduler.total_blocks, block_size=scheduler.block_size, positions=config.max_model_len
    )
    info = BackendInfo(
        name=name,
        numerics="exact",
        batch_invariant=True,
        kv_bytes_per_token=8 * weights.shape.kv_elements(),
        weight_bytes=weights.nbytes,
        recipe=recipe(weights.shape, weights.digest, excluded, numerics="exact", revision=EXACT_REVISION),
    )
    return KernelBackend(info, model, excluded)


def recipe(shape: Shape, digest: str, excluded: Sequence[int], **numerics: Any) -> dict[str, Any]:
    """All that decides an output bit, JSON-safe: architecture, SHA-256 of the weights, ids left out, arithmetic."""
    return {
        "shape": msgspec.to_builtins(shape),
        "weights_sha256": digest,
        "excluded_token_ids": sorted(excluded),
        **numerics,
    }
