"""Floating-point numerics on torch: the plain path against a textbook loop, and what it claims about batches."""
# ruff: noqa: E402 - what is imported needs the libraries that are looked for first

import pytest

from tests.support.models import NO_TORCH, SHAPE, VOCAB_SIZE, config, item, job_list, prompt, save_model

torch = pytest.importorskip("torch", reason=NO_TORCH)

import msgspec

from engine_stub.backend import registry, torch_backend
from engine_stub.model import jobs, torch_fast, torch_steps
from engine_stub.model.loop import PlainLoop
from engine_stub.model.torch_graphs import DecodeGraphs
from engine_stub.model.torch_plain import PlainOps
from engine_stub.model.weights import HashedTensors
from engine_stub.recipe import recipe_fingerprint
from engine_stub.scheduler import Request, Scheduler, SchedulerConfig

torch.set_num_threads(1)  # small products on shared cores: threads would wait for each other


def fast_model(dtype="float32", *, is_invariant=False, blocks=256, block_size=4, shape=SHAPE):
    weights = torch_fast.load(shape, HashedTensors(0), "cpu", dtype)
    ops = PlainOps(shape, is_invariant=is_invariant)
    return torch_fast.FastModel(weights, ops, blocks=blocks, block_size=block_size, positions=128)


def rows_of(model, chunk=7, todo=None):
    rows = []
    jobs.run(
        model, todo or job_list(), model.block_size, chunk, lambda job, logits, row: rows.append((job, logits.row(row)))
    )
    return sorted(rows, key=lambda pair: pair[0])


@pytest.mark.parametrize("is_invariant", [False, True])
def test_float32_agrees_with_a_textbook_loop(is_invariant):
    todo = job_list()
    loop = PlainLoop(SHAPE, HashedTensors(0), torch, torch.from_numpy, 64)
    model = fast_model(is_invariant=is_invariant)
    assert jobs.run(model, todo, 4, 7) == [loop.generate(job.prompt, job.new_tokens) for job in todo]


def test_bfloat16_is_near_float32():
    """Logits have a deviation of 4; bfloat16 keeps 8 bits."""
    texts = [item(prompt(number, 20), 0, range(5 * number, 5 * number + 5)) for number in range(4)]
    wide, narrow = (fast_model(dtype).forward(texts).values for dtype in ("float32", "bfloat16"))
    assert (wide - narrow).abs().mean() < 0.15
    assert torch.nn.functional.cosine_similarity(wide, narrow).min() > 0.999


def test_invariant_rows_have_the_same_bits_among_many_residents():
    """60 decodes of ragged contexts and three chunks in one call, against single ones in pools of their own."""
    starts = [1 + 37 * number % 30 for number in range(63)]
    texts = [prompt(number, start + (11 if number >= 60 else 1)) for number, start in enumerate(starts)]
    width = 11
    tables = [range(number * width, (number + 1) * width) for number in range(63)]
    model = fast_model(is_invariant=True, blocks=63 * width)
    model.forward([item(text[:start], 0, table) for text, start, table in zip(texts, starts, tables, strict=True)])
    together = model.forward(
        [item(text[start:], start, table) for text, start, table in zip(texts, starts, tables, strict=True)]
    ).values.clone()
    for number in (0, 17, 42, 59, 60, 62):
        alone = fast_model(is_invariant=True, blocks=width)
        text, start = texts[number], starts[number]
        alone.forward([item(text[:start], 0, range(width))])
        assert torch.equal(alone.forward([item(text[start:], start, range(width))]).values[0], together[number])


def test_invariant_rows_do_not_depend_on_chunks_and_blocks():
    whole = rows_of(fast_model(is_invariant=True), 1000)
    for chunk, block_size in ((1, 4), (3, 16), (7, 1)):
        other = rows_of(fast_model(is_invariant=True, block_size=block_size), chunk)
        assert all((ours == theirs).all() for (_, ours), (_, theirs) in zip(other, whole, strict=True))


def test_under_the_scheduler_and_what_it_says_of_itself(tmp_path):
    settings = config(
        SchedulerConfig(kv_tokens=256, block_size=4, prefill_chunk_size=5), numerics="fast", dtype="float32"
    )
    backend, scheduler = registry.create("torch", settings), Scheduler(settings.scheduler)
    for number, job in enumerate(job_list()):
        scheduler.submit(Request(id=str(number), prompt_ids=job.prompt, max_tokens=job.new_tokens))
    sequences = [scheduler.sequence(str(number)) for number in range(6)]
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, backend.forward(plan))
    assert [sequence.output for sequence in sequences] == jobs.run(fast_model(), job_list(), 4, 7)
    info = backend.info
    assert (info.numerics, info.batch_invariant, info.kv_bytes_per_token) == ("fast", False, 2 * 2 * 2 * 8 * 4)
    assert info.recipe["kernels"] == "torch"
    invariant = torch_backend.fast_backend(settings, is_invariant=True)
    assert invariant.info.batch_invariant
    assert recipe_fingerprint(info) != recipe_fingerprint(registry.create("torch", config()).info)
    saved = config(numerics="fast", dtype="float32", path=str(save_model(tmp_path / "model")))
    assert recipe_fingerprint(registry.create("torch", saved).info) == recipe_fingerprint(info)


def test_excluded_ids_are_never_generated():
    def run(**model):
        settings = config(numerics="fast", dtype="float32", **model)
        backend, scheduler = registry.create("torch", settings), Scheduler(settings.scheduler)
        scheduler.submit(Request(id="a", prompt_ids=prompt(4, 9), max_tokens=8))
        sequence = scheduler.sequence("a")
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, backend.forward(plan))
        return sequence.output

    free = run()
    assert not {free[0], free[3]} & set(run(excluded_token_ids=(free[0], free[3])))


def test_dtypes_that_are_no_floats_are_refused():
    with pytest.raises(registry.BackendError, match="numerics fast has bfloat16, float16, float32"):
        registry.create("torch", config(numerics="fast", dtype="int4"))


def test_tied_embeddings_share_their_memory():
    shape = msgspec.structs.replace(SHAPE, tie_embeddings=True)
    weights = torch_fast.load(shape, HashedTensors(0), "cpu", "float32")
    assert weights.head is weights.embedding


def test_rows_ban_and_break_ties_like_the_exact_ones():
    rows = torch_fast.FastLogits(torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]]))
    assert rows.best() == [1, 0]
    rows.ban(None, [0])
    rows.ban(0, [1])
    assert rows.best() == [2, 1]
    with pytest.raises(ArithmeticError, match="row 1"):
        torch_fast.FastLogits(torch.tensor([[1.0, 2.0], [1.0, float("nan")]])).best()


def test_random_weights_have_the_shape_of_loaded_ones():
    made, loaded = (
        torch_fast.random_weights(SHAPE, "cpu", "float32"),
        torch_fast.load(SHAPE, HashedTensors(0), "cpu", "float32"),
    )
    assert made.nbytes == loaded.nbytes
    for ours, theirs in zip(made.layers, loaded.layers, strict=True):
        for name in ours.__struct_fields__:
            assert getattr(ours, name).shape == getattr(theirs, name).shape
    assert made.layers[0].down.var() * SHAPE.intermediate == pytest.approx(1, rel=0.2)


def steps(items, **fields):
    return torch_steps.of_items(items, 4, fields.pop("tile_positions", 4), "cpu", **fields)


def test_tiles_cover_every_row_once():
    items = [
        item(prompt(1, 9), 3, [0, 1, 2]),
        item([5], 70, range(20)),
        item(prompt(2, 4), 0, [30]),
        item([6], 2, [40]),
    ]
    step = steps(items)
    assert [(tiles.start, tiles.end, tiles.is_decode, tiles.longest) for tiles in step.tiles] == [
        (0, 2, True, 71),
        (2, 15, False, 12),
    ]
    decode, rest = (tiles.columns.T.tolist() for tiles in step.tiles)
    assert decode == [[0, 0, 1, 2], [1, 1, 1, 70]]
    assert rest == [[2, 0, 4, 0], [3, 4, 4, 3], [3, 8, 4, 7], [3, 12, 1, 11]]
    assert step.tables[:, :3].tolist() == [[40, 0, 0], [0, 1, 2], [30, 0, 0], [0, 1, 2]]


def test_long_prompts_are_split_into_parts(monkeypatch):
    monkeypatch.setattr(torch_steps, "PART_ROWS", 10)
    step = steps([item(prompt(1, 23), 0, range(6)), item(prompt(2, 5), 0, [7, 8])])
    assert [(tiles.start, tiles.end) for tiles in step.tiles] == [(0, 9), (9, 17), (17, 25), (25, 28)]
    rows = [tiles.start + row for tiles in step.tiles for row in tiles.columns[1].tolist()]
    counts = [count for tiles in step.tiles for count in tiles.columns[2].tolist()]
    assert [row + count for row, count in zip(rows, counts, strict=True)] == [*rows[1:], 28]


class Recorder:
    """In place of a CUDA graph: computes anew from the recorded tensors at each replay."""

    def __init__(self):
        self.captures = 0

    def __call__(self, compute):
        self.captures += 1
        logits = compute().clone()
        return lambda: logits.copy_(compute()), logits


def test_decode_graphs_pad_overwrite_and_are_recorded_once_per_size():
    seen = []

    def run(step):
        seen.append((step.tiles[0].longest, step.tables.shape[1], len(step.tokens)))
        columns = [step.tokens, step.positions, step.writes, step.tables[:, 0], step.tiles[0].columns[3]]
        return torch.stack([column.float() for column in columns], dim=1)[step.wanted]

    record = Recorder()
    graphs = DecodeGraphs(run, block_size=4, pad_block=99, device="cpu", capture=record)
    first = [item([number], number, [10 + number, 20]) for number in range(3)]
    second = [item([number + 50], 5, [30 + number, 40 + number]) for number in range(4)]
    assert graphs.forward(first).tolist() == [[n, n, 40 + 5 * n, 10 + n, n] for n in range(3)]
    assert graphs.forward(second).tolist() == [[50 + n, 5, 4 * (40 + n) + 1, 30 + n, 5] for n in range(4)]
    assert graphs.forward(first[:1]).tolist() == [[0, 0, 40, 10, 0]]
    assert record.captures == 2
    assert set(seen) == {(64, 16, 4), (64, 16, 1)}
    graphs.forward([item([1], 64, range(17))])
    assert seen[-1] == (128, 32, 1)


def test_graphs_are_bounded(monkeypatch):
    monkeypatch.setattr("engine_stub.model.torch_graphs.MAX_GRAPHS", 2)
    record = Recorder()
    graphs = DecodeGraphs(
        lambda step: step.tokens[:, None].float(), block_size=4, pad_block=9, device="cpu", capture=record
    )
    for count in (1, 2, 1, 4, 1, 2):
        graphs.forward([item([1], 0, [0])] * count)
    assert record.captures == 4


def test_vocabularies_are_whole():
    assert fast_model().forward([item([1], 0, [0])]).values.shape == (1, VOCAB_SIZE)
