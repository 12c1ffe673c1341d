"""`engine-stub selftest` and `engine-stub bench`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine_stub.cli import main
from engine_stub.model import bench, selftest
from engine_stub.model.shape import NAMED, of_architecture
from tests.support.models import NO_TORCH


def invoke(*arguments):
    return CliRunner().invoke(main, arguments)


def needs_torch():
    pytest.importorskip("torch", reason=NO_TORCH)


def test_bits_are_the_published_ones_however_the_jobs_run():
    weights = selftest.weights_on("numpy", "cpu")
    for chunk, block_size in ((7, 4), (1, 1), (1000, 16)):
        assert selftest.bits(weights, chunk=chunk, block_size=block_size) == selftest.EXPECTED_BITS


def test_the_documentation_names_the_hash():
    page = Path(__file__).parents[2] / "docs" / "engine.md"
    assert selftest.EXPECTED_BITS in page.read_text(encoding="utf-8")


def test_the_command_prints_the_hash_and_a_verdict():
    result = invoke("selftest", "--bits")
    assert (result.exit_code, result.output) == (0, f"{selftest.EXPECTED_BITS}\n")
    result = invoke("selftest")
    assert result.exit_code == 0
    assert result.output.endswith("numpy on cpu: the known one\n")


def test_torch_has_the_same_hash():
    needs_torch()
    result = invoke("selftest", "--bits", "--backend", "torch")
    assert (result.exit_code, result.output) == (0, f"{selftest.EXPECTED_BITS}\n")


def test_another_hash_is_exit_1(monkeypatch):
    monkeypatch.setattr(selftest, "EXPECTED_BITS", "0" * 64)
    result = invoke("selftest")
    assert result.exit_code == 1
    assert f"NOT the known one, {'0' * 64}" in result.output


def test_the_hash_sees_a_single_bit(monkeypatch):
    """One weight moved by one unit."""
    weights = selftest.weights_on("numpy", "cpu")
    weights.layers[3].down[17, 5] += 1
    assert selftest.bits(weights) != selftest.EXPECTED_BITS


def test_a_device_that_is_not_there_is_a_usage_error():
    needs_torch()
    result = invoke("selftest", "--backend", "torch", "--device", "cuda:99")
    assert result.exit_code == 2
    assert "device 'cuda:99'" in result.output


def test_bench_measures_batches_operations_and_the_loop():
    result = invoke("bench", "--shape", "tiny", "--batch", "1,4", "--context", "8", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["batch"] for row in report["batches"]] == [1, 4]
    for row in report["batches"]:
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
    assert report["batches"][1]["gain"] == pytest.approx(
        report["batches"][1]["tokens_per_s"] / report["batches"][0]["tokens_per_s"]
    )
    assert {row["name"] for row in report["operations"]} == {"norm", "linear", "attention", "feed_forward"}
    assert report["loop"]["jobs"] == 16
    assert report["bandwidth"] is None


def test_bench_prints_text():
    result = invoke("bench", "--shape", "tiny", "--batch", "2", "--context", "8")
    assert result.exit_code == 0, result.output
    assert "numerics exact" in result.output
    assert "in a plain eager loop over the same weights" in result.output


def test_the_8b_script_runs_reduced_on_a_cpu_and_says_so():
    needs_torch()
    result = invoke(
        "bench", "--backend", "torch", "--shape", "8b", "--batch", "2", "--context", "2048", "--dtype", "f32"
    )
    assert result.exit_code == 0, result.output
    assert "NOT run on a GPU" in result.output
    assert "of a plain copy's" in result.output


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--batch", "1,x"), "give numbers of at least 1"),
        (("--batch", "0"), "give numbers of at least 1"),
        (("--shape", "8b"), "numerics fast needs --backend torch"),
        (("--shape", "8b", "--numerics", "exact"), "use --numerics fast"),
        (("--shape", "7b"), "'7b' is not one of"),
    ],
)
def test_bench_refuses_what_it_cannot_run(arguments, what):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert what in result.output


def test_bytes_of_an_8b_step():
    """16 GB of weights less the embedding (1.05 GB), 128 KiB of K/V per position."""
    shape = of_architecture(NAMED["8b"], 128_256)
    assert shape.parameters == 8_030_261_248
    figure = bench.bandwidth(shape, 2, batch=64, context=2048, step=0.010, copy_gb_per_s=4000.0)
    assert figure.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096) + 2 * 64 * 4096
    assert figure.kv_bytes == 64 * 2049 * 131_072
    assert figure.share == pytest.approx((figure.weight_bytes + figure.kv_bytes) / 0.010 / 4e12)
