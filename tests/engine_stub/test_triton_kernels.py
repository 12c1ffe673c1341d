"""Every Triton kernel against the plain path, through Triton's interpreter on the CPU."""
# ruff: noqa: E402 - what is imported needs the libraries that are looked for first

import os

import pytest

from tests.support.models import NO_TORCH, NO_TRITON, item, prompt

torch = pytest.importorskip("torch", reason=NO_TORCH)
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason=NO_TRITON)

import numpy as np

from engine_stub.config import Architecture
from engine_stub.model import torch_fast, torch_triton
from engine_stub.model.shape import of_architecture
from engine_stub.model.torch_plain import PlainOps
from engine_stub.model.torch_steps import of_items
from engine_stub.model.torch_triton import TritonOps
from engine_stub.model.weights import HashedTensors

# Sizes that are no powers of two where the kernels must mask.
SHAPE = of_architecture(
    Architecture(layers=1, hidden=48, heads=6, kv_heads=2, head_dim=12, intermediate=20), vocab_size=200
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE = 4


torch.set_num_threads(1)  # small products on shared cores: threads would wait for each other


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several splits and key blocks within a few dozen positions."""
    monkeypatch.setattr(torch_triton, "SPLIT", 32)
    monkeypatch.setattr(torch_triton, "KEYS", 16)
    monkeypatch.setattr(torch_triton, "SWIGLU_BLOCK", 16)


def values(*dimensions, dtype=torch.float32, seed=0):
    return torch.randn(dimensions, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_add_norm(dtype):
    x, delta, weight = (values(*size, dtype=dtype, seed=n) for n, size in enumerate([(3, 48), (3, 48), (48,)]))
    plain, fused = PlainOps(SHAPE), TritonOps(SHAPE)
    assert_near(fused.norm(x, weight), plain.norm(x, weight))
    for found, expected in zip(fused.add_norm(x, delta, weight), plain.add_norm(x, delta, weight), strict=True):
        assert_near(found, expected)
    assert fused.norm(x[:0], weight).shape == (0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    gate_up = 3 * values(3, 40, dtype=dtype)
    assert_near(TritonOps(SHAPE).swiglu(gate_up), PlainOps(SHAPE).swiglu(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_store_writes_its_cache_rows_and_no_others(dtype):
    items = [item([1], 5, [3, 1]), item(prompt(1, 3), 2, [4, 0])]
    step = of_items(items, BLOCK_SIZE, 4, "cpu")
    qkv = values(4, 10 * 12, dtype=dtype)
    turn = (values(16, 6, seed=1), values(16, 6, seed=2))
    results = []
    for ops in (PlainOps(SHAPE), TritonOps(SHAPE)):
        keys, stored = (torch.full((24, 2, 12), 7.0, dtype=dtype) for _ in range(2))
        results.append((ops.rotate_store(qkv, turn, step, keys, stored), keys, stored))
    for found, expected in zip(results[1], results[0], strict=True):
        assert_near(found, expected)
    untouched = [row for row in range(24) if row not in step.writes.tolist()]
    assert len(untouched) == 20
    assert (results[1][1][untouched] == 7).all()


def attention_case(dtype):
    """Decodes of 1, 32 and 70 positions, a chunk in the middle of a text, and a prompt, over shuffled blocks."""
    blocks = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    items = [
        item([1], 0, blocks[:1]),
        item([1], 31, blocks[1:9]),
        item([1], 69, blocks[9:27]),
        item(prompt(1, 7), 30, blocks[27:37]),
        item(prompt(2, 5), 0, blocks[37:39]),
    ]
    cache = [values(64 * BLOCK_SIZE, 2, 12, dtype=dtype, seed=seed) for seed in (1, 2)]
    return items, values(15, 6, 12, dtype=dtype), cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_invariant", [False, True])
def test_attention(dtype, is_invariant):
    items, query, (keys, stored) = attention_case(dtype)
    plain = PlainOps(SHAPE).attend(query, keys, stored, of_items(items, BLOCK_SIZE, 1 << 30, "cpu"))
    ops = TritonOps(SHAPE, is_invariant=is_invariant)
    assert_near(ops.attend(query, keys, stored, of_items(items, BLOCK_SIZE, ops.tile_positions, "cpu")), plain)


def test_plain_attention_row_by_row_is_the_same_attention():
    items, query, (keys, stored) = attention_case(torch.float32)
    step = of_items(items, BLOCK_SIZE, 1 << 30, "cpu")
    assert_near(
        PlainOps(SHAPE, is_invariant=True).attend(query, keys, stored, step),
        PlainOps(SHAPE).attend(query, keys, stored, step),
    )


@pytest.mark.parametrize("is_invariant", [False, True])
def test_a_row_of_attention_has_the_same_bits_alone(is_invariant):
    items, query, (keys, stored) = attention_case(torch.float32)
    ops = TritonOps(SHAPE, is_invariant=is_invariant)
    together = ops.attend(query, keys, stored, of_items(items, BLOCK_SIZE, ops.tile_positions, "cpu"))
    for row in (1, 2):
        alone = of_items([items[row]], BLOCK_SIZE, ops.tile_positions, "cpu")
        assert torch.equal(ops.attend(query[row : row + 1], keys, stored, alone)[0], together[row])


def test_invariant_attention_does_not_depend_on_chunks(monkeypatch):
    """The chunk of 7 positions as one item, and as 7 decodes.

    The interpreter multiplies by BLAS, which treats rows by their place; a tensor core doesn't, nor does einsum.
    """
    monkeypatch.setattr(np, "matmul", lambda left, right, dtype: np.einsum("ij,jk->ik", left, right).astype(dtype))
    items, query, (keys, stored) = attention_case(torch.float32)
    ops = TritonOps(SHAPE, is_invariant=True)
    assert ops.tile_positions == 5  # so the chunk has two tiles
    chunk, rows = items[3], query[3:10]
    whole = ops.attend(rows, keys, stored, of_items([chunk], BLOCK_SIZE, ops.tile_positions, "cpu"))
    single = [item([1], 30 + place, chunk.block_table) for place in range(7)]
    step = of_items(single, BLOCK_SIZE, ops.tile_positions, "cpu")
    assert step.layout.order == list(range(7))
    assert torch.equal(ops.attend(rows, keys, stored, step), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_in_fixed_tiles(dtype):
    x, weight = values(70, 130, dtype=dtype), values(67, 130, dtype=dtype, seed=1)
    found = TritonOps(SHAPE, is_invariant=True).linear(x, weight)
    expected = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(found, expected, atol=5 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    alone = TritonOps(SHAPE, is_invariant=True).linear(x[69:], weight)
    assert torch.equal(alone[0], found[69])


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_whole_model_agrees_with_the_plain_one(is_invariant):
    """A prompt beside a decode, with and without the decode step's graph padding."""
    weights = torch_fast.load(SHAPE, HashedTensors(0), "cpu", "float32")
    ops = {"plain": PlainOps(SHAPE), "fused": TritonOps(SHAPE, is_invariant=is_invariant)}
    results = {}
    for name, op in ops.items():
        model = torch_fast.FastModel(weights, op, blocks=16, block_size=BLOCK_SIZE, positions=64)
        first = model.forward([item(prompt(1, 3), 0, [5])]).values
        second = model.forward([item([4], 3, [5]), item([1, 2], 0, [2])]).values
        results[name] = torch.cat([first, second, model.forward([item([6], 4, [5, 1])]).values])
    assert_near(results["fused"], results["plain"])


def test_decode_graphs_run_the_kernels_on_padded_steps():
    weights = torch_fast.load(SHAPE, HashedTensors(0), "cpu", "float32")
    rows = []
    for has_graphs in (False, True):
        model = torch_fast.FastModel(weights, TritonOps(SHAPE), blocks=16, block_size=BLOCK_SIZE, positions=64)
        if has_graphs:
            model.use_graphs(lambda compute: (lambda: None, compute()))
        items = [item([number + 9], 0, [number]) for number in range(3)]
        rows.append(model.forward(items).values)
        used = [model.layer_cache(0)[0][4 * number] for number in range(3)]
        assert all(row.any() for row in used)
        assert not model.layer_cache(0)[0][16:64].any()
    assert_near(rows[1], rows[0])  # the libraries' products may differ between 3 and 4 rows
