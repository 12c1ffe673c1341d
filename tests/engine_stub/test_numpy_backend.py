"""The numpy backend under the real scheduler."""

import itertools
import subprocess
import sys

import pytest

from engine_stub.backend import registry
from engine_stub.model import jobs
from engine_stub.recipe import recipe_fingerprint
from engine_stub.scheduler import Request, Scheduler, SchedulerConfig
from tests.support.model_runs import ABORTED, NEW_TOKENS, Run, requests
from tests.support.models import SHAPE, config, exact_model, prompt, save_model

CHUNKS, BLOCK_SIZES, BUDGETS, SLOTS = (0, 1, 3, 7), (1, 4, 16), (0, 5), (1, 3, 8)


def test_one_output_set_over_chunks_blocks_budgets_and_slots():
    """72 schedules with aborts, preemptions, recycled slots, prefix hits and repeated steps in the middle."""
    todo = requests()
    # What each request yields alone, on a model without scheduler or neighbours.
    greedy = [request for request in todo if request.sampling.temperature == 0]
    alone = {
        request.id: jobs.run(exact_model(), [jobs.Job(list(request.prompt_ids), NEW_TOKENS)], 4, 7)[0]
        for request in greedy
    }
    outcomes, preemptions, hits, fullest = [], 0, 0, 0
    for chunk, block_size, budget, slots in itertools.product(CHUNKS, BLOCK_SIZES, BUDGETS, SLOTS):
        run = Run(prefill_chunk_size=chunk, block_size=block_size, token_budget=budget, max_active=slots).go()
        outcomes.append(run.outcome())
        preemptions += run.scheduler.preemptions
        hits += sum(cached or 0 for cached in run.cached.values())
        fullest = max(fullest, *run.prompts_of_steps)
        assert run.finishes == {request.id: "length" for request in todo if request.id not in ABORTED}
        assert run.backend.calls >= run.scheduler.steps
    assert len(outcomes) == 72
    assert all(outcome == outcomes[0] for outcome in outcomes)
    tokens, logprobs = outcomes[0]
    assert {key: tokens[key] for key in alone} == {key: alone[key][: ABORTED.get(key)] for key in alone}
    assert [len(top) for top in logprobs["4"]] == [2] * NEW_TOKENS
    assert preemptions > 50
    assert hits > 200
    assert fullest >= 4


def test_a_step_is_one_fused_call():
    run = Run(kv_tokens=1024, max_active=8)
    for request in requests():
        run.scheduler.submit(request)
    run.scheduler.steps = 3  # keeps `step` from repeating one
    while run.scheduler.steps < 5:
        run.step()
    assert run.backend.calls == 2
    assert run.prompts_of_steps == [8, 0]


def test_info_says_what_it_is():
    backend = registry.create("numpy", config())
    info = backend.info
    assert (info.name, info.numerics, info.batch_invariant) == ("numpy", "exact", True)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 8 * 8
    assert info.weight_bytes == 8 * SHAPE.parameters


def test_the_default_model_stores_1536_bytes_per_position():
    assert registry.create("numpy", config(architecture=None)).info.kv_bytes_per_token == 1536


def test_fingerprints_tell_weights_and_arithmetic_but_not_scheduling(tmp_path):
    def fingerprint(scheduler=None, **model):
        return recipe_fingerprint(registry.create("numpy", config(scheduler, **model)).info)

    base = fingerprint()
    assert fingerprint(SchedulerConfig(kv_tokens=512, block_size=16, max_active=3)) == base
    assert fingerprint(path=str(save_model(tmp_path / "same")), architecture=None) == base
    seeded = config().model.architecture.__class__(
        layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, weight_seed=1
    )
    others = {fingerprint(architecture=seeded), fingerprint(vocab_size=201), fingerprint(excluded_token_ids=(5,)), base}
    assert len(others) == 4


def test_ranks_of_a_process_share_weights_and_not_their_cache():
    first, second = (registry.create("numpy", config()) for _ in range(2))
    assert first.model.weights is second.model.weights
    assert first.model._keys is not second.model._keys


def run_one(request, **model):
    settings = config(**model)
    backend, scheduler = registry.create("numpy", settings), Scheduler(settings.scheduler)
    scheduler.submit(request)
    tokens = []
    while (plan := scheduler.plan()) is not None:
        for row in scheduler.commit(plan, backend.forward(plan)).tokens:
            tokens += row
    return tokens


def test_excluded_ids_are_never_generated_and_stop_ids_not_before_min_tokens():
    free = run_one(Request(id="a", prompt_ids=prompt(4, 9), max_tokens=12))
    assert len(free) == 12
    without = run_one(Request(id="a", prompt_ids=prompt(4, 9), max_tokens=12), excluded_token_ids=(free[0], free[3]))
    assert not {free[0], free[3]} & set(without)
    stopping = {"id": "a", "prompt_ids": prompt(4, 9), "max_tokens": 12, "stop_ids": frozenset({free[0]})}
    assert run_one(Request(**stopping)) == free[:1]
    late = run_one(Request(**stopping, min_tokens=5))
    assert free[0] not in late[:4]
    assert len(late) >= 5


def test_logprobs_of_greedy_rows_come_with_the_same_tokens():
    settings = config()
    backend, scheduler = registry.create("numpy", settings), Scheduler(settings.scheduler)
    scheduler.submit(Request(id="a", prompt_ids=prompt(4, 9), max_tokens=3, logprobs=4))
    scheduler.submit(Request(id="b", prompt_ids=prompt(4, 9), max_tokens=3))
    sequences = [scheduler.sequence("a"), scheduler.sequence("b")]
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, backend.forward(plan))
    assert sequences[0].output == sequences[1].output
    assert [top[0][0] for top in sequences[0].logprobs] == sequences[0].output
    assert all(len(top) == 4 and top[0][1] == max(value for _, value in top) for top in sequences[0].logprobs)


def test_fast_numerics_are_refused():
    with pytest.raises(registry.BackendError, match="numerics: fast needs torch"):
        registry.create("numpy", config(numerics="fast"))


def test_shapes_whose_sums_could_round_are_refused():
    wide = config().model.architecture.__class__(
        layers=1, hidden=8, heads=1, kv_heads=1, head_dim=2**18, intermediate=8
    )
    with pytest.raises(registry.BackendError, match="exact numerics: a score over head_dim 262144 needs 54 bits"):
        registry.create("numpy", config(architecture=wide, vocab_size=4))


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_missing_library_is_named_with_the_command_that_gets_it(name):
    script = (
        f"import sys; sys.modules['{name}'] = None\n"
        "from engine_stub.backend import registry\n"
        "from engine_stub.config import StubConfig\n"
        "try:\n"
        f"    registry.create('{name}', StubConfig())\n"
        "except registry.BackendError as error:\n"
        "    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"backend '{name}' needs {name}, which isn't installed: {registry.KERNELS[name]}" in done.stdout, done.stderr


def test_the_stub_without_numpy_imports_and_serves_synthetic():
    script = (
        "import sys; sys.modules['numpy'] = None; sys.modules['torch'] = None\n"
        "from engine_stub.backend import registry\n"
        "from engine_stub.config import StubConfig\n"
        "import engine_stub.serve\n"
        "print(registry.create('synthetic', StubConfig()).info.name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "synthetic", done.stderr


def test_batching_pays_on_one_core():
    """Processor time of a decode step at batch 16 against batch 1: 16 tokens for less than 16/3 of the time."""
    script = (
        "import time\n"
        "from engine_stub.config import StubConfig\n"
        "from engine_stub.model import bench\n"
        "from engine_stub.model.arrays import NumpyArrays\n"
        "from engine_stub.model.exact import ExactModel, load\n"
        "from engine_stub.model.shape import NAMED, of_architecture\n"
        "from engine_stub.model.weights import HashedTensors\n"
        "weights = load(of_architecture(NAMED['small'], 4096), HashedTensors(0), NumpyArrays())\n"
        "model = ExactModel(weights, blocks=bench.pool_blocks(16, 50), block_size=16, positions=64)\n"
        "print(bench.batches(model, (1, 16), 50, time.process_time)[1].gain)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert float(done.stdout) >= 3, done.stderr
