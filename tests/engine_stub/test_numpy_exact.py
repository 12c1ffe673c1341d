"""The exact model on numpy: no bit depends on how a text was computed."""

import itertools

import numpy as np
import pytest

from engine_stub.model import exact, fixed, jobs, layout
from engine_stub.model.loop import PlainLoop
from engine_stub.model.weights import HashedTensors
from tests.support.models import SHAPE, exact_model, item, job_list, prompt


def logits_of(model, todo, block_size, chunk):
    """Bytes of every row of logits, by job."""
    rows = [[] for _ in todo]
    jobs.run(model, todo, block_size, chunk, lambda job, logits, row: rows[job].append(logits.row(row).tobytes()))
    return rows


def test_it_agrees_with_a_textbook_loop_in_floating_point():
    """Another program for the same architecture; rounding to the grid moves logits by some 0.01 of a deviation of 4."""
    todo = job_list()
    loop = PlainLoop(SHAPE, HashedTensors(0), np, np.asarray, 64)
    assert jobs.run(exact_model(), todo, 4, 7) == [loop.generate(job.prompt, job.new_tokens) for job in todo]


def test_logits_of_a_batch_are_those_of_single_runs_to_the_bit():
    todo = job_list()
    batch = logits_of(exact_model(), todo, 4, 7)
    for job, rows in zip(todo, batch, strict=True):
        assert logits_of(exact_model(), [job], 4, 7) == [rows]


@pytest.mark.parametrize(("chunk", "block_size"), list(itertools.product((1, 3, 1000), (1, 4, 16))))
def test_chunks_and_blocks_leave_no_trace(chunk, block_size):
    todo = job_list(4)
    assert logits_of(exact_model(block_size=block_size), todo, block_size, chunk) == logits_of(
        exact_model(), todo, 4, 7
    )


def test_many_residents_beside_prefills_change_nothing():
    """60 decodes of ragged contexts and three chunks in one call, against each item alone in a pool of its own."""
    starts = [1 + 37 * number % 90 for number in range(63)]
    texts = [prompt(number, start + (11 if number >= 60 else 1)) for number, start in enumerate(starts)]
    width = 26
    model = exact_model(blocks=63 * width)
    tables = [range(number * width, (number + 1) * width) for number in range(63)]
    model.forward([item(text[:start], 0, table) for text, start, table in zip(texts, starts, tables, strict=True)])
    last = [item(text[start:], start, table) for text, start, table in zip(texts, starts, tables, strict=True)]
    together = model.forward(last).units.copy()
    for number in (0, 17, 42, 59, 60, 62):
        alone = exact_model(blocks=width)
        text, start = texts[number], starts[number]
        alone.forward([item(text[:start], 0, range(width))])
        assert (alone.forward([item(text[start:], start, range(width))]).units == together[number]).all()


def test_what_other_blocks_hold_is_never_seen():
    clean, dirty = exact_model(), exact_model()
    dirty._keys[:] = np.rint(np.sin(np.arange(dirty._keys.size)) * fixed.LIMIT).reshape(dirty._keys.shape)
    dirty._values[:] = -dirty._keys
    todo = job_list()
    assert logits_of(clean, todo, 4, 7) == logits_of(dirty, todo, 4, 7)


def test_a_step_can_be_asked_for_again():
    model = exact_model()
    first = [item(prompt(1, 9), 0, [0, 1, 2]), item(prompt(2, 5), 0, [3, 4])]
    once = model.forward(first).units.copy()
    assert (model.forward(first).units == once).all()
    decode = [item([3], 9, [0, 1, 2]), item([4], 5, [3, 4])]
    once = model.forward(decode).units.copy()
    model.forward(decode[:1])
    assert (model.forward(decode).units == once).all()


def test_texts_longer_than_an_exact_sum_are_summed_in_fixed_pieces(monkeypatch):
    """With pieces of 8 positions every text here has several; the sums are still exact, so nothing changes."""
    whole = logits_of(exact_model(), job_list(), 4, 7)
    monkeypatch.setattr(fixed, "EXACT_POSITIONS", 8)
    assert logits_of(exact_model(), job_list(), 4, 7) == whole


@pytest.mark.parametrize(("context", "scores"), [(1, 1), (2000, 300), (300, 5000)])
def test_attention_in_small_parts_is_the_same_attention(monkeypatch, context, scores):
    whole = logits_of(exact_model(), job_list(), 4, 1000)
    monkeypatch.setattr(exact, "CONTEXT_ELEMENTS", context)
    monkeypatch.setattr(exact, "SCORE_ELEMENTS", scores)
    assert logits_of(exact_model(), job_list(), 4, 1000) == whole


def test_a_long_prompt_needs_no_square_of_memory(monkeypatch):
    """Scores of 3000 x 3000 positions and 4 heads would be 288 MB; the largest product here has 2^20 elements."""
    monkeypatch.setattr(exact, "SCORE_ELEMENTS", 1 << 20)
    model = exact_model(blocks=800, positions=3000)
    sizes = []
    multiply = model.arrays.matmul

    def matmul(left, right):
        product = multiply(left, right)
        sizes.append(product.size)
        return product

    monkeypatch.setattr(model.arrays, "matmul", matmul)
    model.forward([item(prompt(1, 3000), 0, range(750))])
    assert max(sizes) <= 1 << 20


def test_every_position_of_the_context_matters():
    """A model that forgot part of its context would pass all comparisons with itself."""
    text = prompt(3, 40)
    table = range(12)

    def logits(tokens):
        return exact_model().forward([item(tokens, 0, table)]).units[0]

    original = logits(text)
    for position in (0, 1, 7, 20, 38, 39):
        changed = list(text)
        changed[position] = (changed[position] + 1) % 200
        assert (logits(changed) != original).any()
    swapped = [text[1], text[0], *text[2:]]
    assert (logits(swapped) != original).any()


def test_items_that_want_no_token_store_their_text_all_the_same():
    text = prompt(5, 12)
    model = exact_model()
    rows = model.forward([item(text[:6], 0, [0, 1, 2], needs_token=False)])
    assert rows.best() == []
    rows = model.forward([item(text[6:], 6, [0, 1, 2]), item(text[:6], 0, [3, 4], needs_token=False)])
    assert (rows.units == exact_model().forward([item(text, 0, [7, 8, 9])]).units).all()


def test_rows_come_in_the_order_of_the_items():
    long, short = item(prompt(1, 40), 0, range(10)), item(prompt(2, 3), 0, [20])
    one = item(prompt(3, 1), 0, [30])
    rows = exact_model().forward([long, one, short]).units
    for place, alone in enumerate((long, one, short)):
        assert (exact_model().forward([alone]).units[0] == rows[place]).all()


def test_equal_logits_yield_the_lowest_id():
    units = np.array([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    assert exact.ExactLogits(units, exact_model().arrays).best() == [1, 0]


def test_a_layout_groups_decodes_of_like_length():
    items = [
        item([1], 40, range(11)),
        item(prompt(1, 5), 0, [20, 21]),
        item([2], 63, range(30, 46)),
        item([3], 2, [50]),
    ]
    made = layout.build(items, 4)
    assert [(group.items, group.new, group.context.shape[1]) for group in made.groups] == [
        (1, 1, 3),
        (2, 1, 64),
        (1, 5, 5),
    ]
    assert made.order == [3, 0, 2, 1]
    assert made.tokens.tolist() == [3, 1, 2, *prompt(1, 5)]
    assert made.writes.tolist() == [202, 40, 183, 80, 81, 82, 83, 84]
    assert made.wanted.tolist() == [1, 7, 2, 0]
    with pytest.raises(ValueError, match="without tokens"):
        layout.build([item([], 3, [0])], 4)
