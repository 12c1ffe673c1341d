"""The exact model on torch: the bits of numpy."""
# ruff: noqa: E402 - what is imported needs the libraries that are looked for first

import pytest

from tests.support.models import NO_TORCH, config, exact_model, item, job_list, prompt

torch = pytest.importorskip("torch", reason=NO_TORCH)

import numpy as np

from engine_stub.backend import registry
from engine_stub.model import jobs
from engine_stub.model.exact import ExactLogits
from engine_stub.model.torch_arrays import TorchArrays
from engine_stub.recipe import recipe_fingerprint
from tests.support.model_runs import Run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


torch.set_num_threads(1)  # small products on shared cores: threads would wait for each other


def bits(model):
    rows = []
    jobs.run(model, job_list(), 4, 7, lambda job, logits, row: rows.append((job, logits.row(row).tobytes())))
    return rows


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_numpy_to_the_bit(device):
    assert bits(exact_model(TorchArrays(device))) == bits(exact_model())


def test_the_thread_count_leaves_no_trace():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = bits(exact_model(TorchArrays()))
        torch.set_num_threads(2)
        assert bits(exact_model(TorchArrays())) == one
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_active": 8},
        {"prefill_chunk_size": 3, "block_size": 1, "token_budget": 5, "max_active": 3},
        {"prefill_chunk_size": 7, "block_size": 16, "max_active": 1},
    ],
)
def test_outputs_under_the_scheduler_are_those_of_numpy(schedule):
    assert Run("torch", **schedule).go().outcome() == Run("numpy", max_active=3).go().outcome()


def test_fingerprints_are_equal_because_tokens_are():
    infos = [registry.create(name, config()).info for name in ("numpy", "torch")]
    assert len({recipe_fingerprint(info) for info in infos}) == 1
    assert [info.name for info in infos] == ["numpy", "torch"]


def test_equal_logits_yield_the_lowest_id_and_bans_hold():
    rows = ExactLogits(torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]], dtype=torch.float64), TorchArrays())
    assert rows.best() == [1, 0]
    rows.ban(None, [0])
    rows.ban(0, [1])
    assert rows.best() == [2, 1]
    assert rows.row(1)[1:].tolist() == [2.0 * 2**-24] * 2


def test_no_wanted_row_is_no_error():
    rows = exact_model(TorchArrays()).forward([item(prompt(1, 5), 0, [0, 1], needs_token=False)])
    assert rows.best() == []


def test_a_device_that_is_not_there_is_refused_by_name():
    with pytest.raises(registry.BackendError, match="device 'cuda:99'"):
        registry.create("torch", config(device="cuda:99"))
    with pytest.raises(registry.BackendError, match="device 'abacus'"):
        registry.create("torch", config(device="abacus"))


def test_read_only_arrays_are_copied():
    values = np.arange(3.0)
    values.setflags(write=False)
    placed = TorchArrays().put(values)
    placed += 1
    assert values.tolist() == [0, 1, 2]
