"""The DGR-012 table, computed, and what moves each of its columns."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from engine_stub.backend import registry
from engine_stub.cli import main
from engine_stub.config import load_config
from engine_stub.scheduler import ForwardOutput
from engine_stub.sweep import Workload, saturation, sweep

LEVELS = (1, 2, 4, 8)
TABLE = [
    # concurrency, ticks, mean and max occupancy, tokens per tick, peak KV bytes
    (1, 64, 1.000, 1, 1.375, 15360),
    (2, 33, 1.750, 2, 2.667, 29184),
    (4, 19, 3.111, 4, 4.632, 52224),
    (8, 15, 4.000, 7, 5.867, 75264),
]


def swept(profile="dgr012", workload=None, levels=LEVELS, backend="synthetic", **scheduler):
    config = load_config(profile, None, {}, {})
    config = msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, **scheduler))
    return sweep(backend, config, workload or Workload(), levels)


def cells(result):
    return [
        (
            level.concurrency,
            level.ticks,
            round(level.occupancy_avg, 3),
            level.occupancy_max,
            round(level.tokens_per_tick, 3),
            level.kv_peak_bytes,
        )
        for level in result.levels
    ]


def column(result, name):
    return [getattr(level, name) for level in result.levels]


@pytest.mark.parametrize("backend", ["synthetic", "numpy", "torch"])
def test_all_cells_of_the_table(backend):
    if backend != "synthetic":
        pytest.importorskip(backend, reason=f"backend {backend} needs {backend}, which isn't installed")
    result = swept(backend=backend)
    assert cells(result) == TABLE
    assert column(result, "decode_ticks") == [56, 32, 18, 14]
    assert result.saturation_concurrency == 8
    assert result.corruption_free
    assert result.backend.kv_bytes_per_token == 2 * 6 * 2 * 8 * 8 == 1536


def test_every_tick_is_one_forward():
    result = swept()
    assert column(result, "forwards") == column(result, "ticks")


@pytest.mark.parametrize("cap", [1, 3, 4, 7])
def test_any_prompt_token_cap_below_two_prompts_gives_the_same_table(cap):
    assert cells(swept(max_prefills_per_tick=None, max_prefill_tokens_per_tick=cap)) == TABLE


def test_two_prompts_per_tick_give_another_table():
    result = swept(max_prefills_per_tick=None, max_prefill_tokens_per_tick=8)
    assert column(result, "ticks") == [64, 32, 17, 11]
    assert column(result, "occupancy_max")[-1] == 8


def test_aprender_needs_the_same_ticks_at_another_occupancy():
    result = swept("aprender")
    assert column(result, "ticks") == [64, 33, 19, 15]
    assert [round(value, 3) for value in column(result, "occupancy_avg")] == [1.000, 1.939, 3.368, 4.267]
    assert column(result, "occupancy_max") == [1, 2, 4, 8]


def test_the_high_water_mark_includes_what_the_tick_itself_released():
    # 4 + 7 positions before the release at concurrency 1; all eight at once at 8, as one forward stores them.
    assert [size // 1536 for size in column(swept(), "kv_high_water_bytes")] == [11, 21, 38, 60]


@pytest.mark.parametrize(
    ("block_size", "reserved"),
    [(4, [18432, 36864, 61440, 92160]), (16, [24576, 49152, 98304, 172032])],
)
def test_used_and_reserved_bytes_are_separate(block_size, reserved):
    result = swept(block_size=block_size)
    assert column(result, "kv_peak_bytes") == [row[-1] for row in TABLE]
    assert column(result, "kv_reserved_peak_bytes") == reserved


def test_saturation_is_the_smallest_level_that_no_higher_one_beats():
    assert swept(workload=Workload(jobs=2)).saturation_concurrency == 2
    level = swept().levels[0]
    levels = [
        msgspec.structs.replace(level, concurrency=concurrency, occupancy_avg=occupancy)
        for concurrency, occupancy in ((1, 1.0), (2, 3.0), (4, 3.0), (8, 2.5))
    ]
    assert saturation(levels) == 2


class Batchy:
    """A backend whose tokens depend on the batch: a real model with the wrong kernels."""

    name = "batchy"

    def __init__(self, honest):
        self.info = honest.info
        self._honest = honest

    def forward(self, plan):
        output = self._honest.forward(plan)
        if len(plan.decodes) < 3:
            return output
        return ForwardOutput([token ^ 1 for token in output.decode_tokens], output.prefill_tokens)


@pytest.fixture
def batchy(monkeypatch):
    create = registry.create
    monkeypatch.setattr(registry, "create", lambda name, config: Batchy(create(name, config)))


@pytest.mark.usefixtures("batchy")
def test_a_batch_that_changes_tokens_is_found():
    result = swept()
    assert column(result, "is_corruption_free") == [True, True, False, False]
    assert not result.corruption_free


@pytest.mark.usefixtures("batchy")
def test_corruption_is_the_commands_status():
    result = CliRunner().invoke(main, ["sweep", "--backend", "synthetic"])
    assert result.exit_code == 1
    assert "corruption_free false" in result.output


def test_the_command_prints_the_table():
    result = CliRunner().invoke(main, ["sweep", "--backend", "synthetic"])
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()[2:6]]
    assert [
        (int(line[0]), int(line[1]), float(line[3]), int(line[4]), float(line[5]), int(line[6])) for line in lines
    ] == TABLE
    assert "saturation_concurrency 8" in result.output
    assert "corruption_free true" in result.output


def test_the_command_prints_json():
    result = CliRunner().invoke(main, ["sweep", "--backend", "synthetic", "--json", "--concurrency", "4"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert [level["ticks"] for level in report["levels"]] == [19]
    assert report["corruption_free"] is True
    assert report["saturation_concurrency"] == 4
    assert report["workload"] == {"jobs": 8, "prompt_tokens": 4, "new_tokens": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "none"], "available: aprender, default, dgr012, sarathi"),
        (["--backend", "none"], "is not known"),
        (["--prompt-tokens", "4090"], "REJECTED_KV_BUDGET"),
    ],
)
def test_what_cannot_run_is_a_usage_error(arguments, message):
    result = CliRunner().invoke(main, ["sweep", "--backend", "synthetic", *arguments])
    assert result.exit_code == 2
    assert message in result.output
