"""A model that really reads its text from the paged KV pool, so that a wrong block table changes its tokens.

It stores (position, token) where a transformer stores K and V, reads positions 0..end back through the
block table, and hashes what it finds. Any block that was shared, reused or evicted wrongly shows up:
as an assertion here, or as a token that differs from `expected`.
"""

from zlib import crc32

from engine_stub.backend import BackendInfo, ForwardOutput
from engine_stub.scheduler import SchedulerConfig
from tests.support.stub_scheduler import VOCAB_SIZE, Driver

SPREAD = 2654435761


def next_token(text, seed=None):
    checksum = crc32(b"".join(token.to_bytes(4, "little") for token in text), seed or 0)
    return (checksum * SPREAD >> 7) % VOCAB_SIZE


def expected(req):
    """What the model says without any paging."""
    text = list(req.prompt_ids)
    for _ in range(req.max_tokens):
        text.append(next_token(text, req.seed))
    return text[len(req.prompt_ids) :]


class PagedModel:
    """`broken` is called before every forward and may raise or spoil the plan's computation."""

    name = "paged"

    def __init__(self, config, broken=lambda _plan: None):
        self.info = BackendInfo(
            name=self.name, numerics="exact", batch_invariant=True, kv_bytes_per_token=100, recipe={"paged": 1}
        )
        self.forwards = 0
        self.broken = broken
        self._block_size = config.block_size
        self._store = [None] * config.capacity_tokens

    def forward(self, plan):
        self.forwards += 1
        self.broken(plan)
        items = plan.items()
        assert len({item.request_id for item in items}) == len(items)
        for item in items:
            for offset, token in enumerate(item.token_ids):
                position = item.start + offset
                self._store[self._row(item, position)] = (position, token)
        tokens = [next_token(self._text(item), item.seed) if item.needs_token else None for item in items]
        return ForwardOutput.of_items(plan, tokens)

    def _row(self, item, position):
        return item.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _text(self, item):
        stored = [self._store[self._row(item, position)] for position in range(item.end)]
        text = [*item.prompt_ids, *item.output_ids]
        assert [entry and entry[0] for entry in stored] == list(range(item.end))
        assert [entry[1] for entry in stored] == text[: item.end]
        return text


class PagedDriver(Driver):
    """The scheduler's driver with this model; `settings` is a SchedulerConfig or its fields."""

    def __init__(self, settings=None, **fields):
        config = settings or SchedulerConfig(**fields)
        super().__init__(**{name: getattr(config, name) for name in config.__struct_fields__})
        self.backend = PagedModel(config)
