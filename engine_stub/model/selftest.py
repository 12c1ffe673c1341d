"""One number for the exact arithmetic of a machine: SHA-256 over the logits of a fixed list of jobs."""

import hashlib

from engine_stub.config import Architecture
from engine_stub.model import jobs
from engine_stub.model.arrays import Arrays, NumpyArrays
from engine_stub.model.backend import LogitRows
from engine_stub.model.exact import ExactModel, ExactWeights, load
from engine_stub.model.shape import Shape, of_architecture
from engine_stub.model.weights import HashedTensors, uniform_units

EXPECTED_BITS = "901492d61f8aa9b65ccb81a45d5e9ab2211621c48da24877d2ee18a1a2d41386"
"""What every library and device must give. It changes with the arithmetic only (`backend.EXACT_REVISION`)."""
VOCAB_SIZE = 1000
PROMPT_LENGTHS = (3, 8, 13, 18, 23, 28, 33, 38)
NEW_TOKENS = 8
CHUNK = 7
BLOCK_SIZE = 4


def shape() -> Shape:
    """The small default model with a small vocabulary."""
    return of_architecture(Architecture(), VOCAB_SIZE)


def fixed_jobs() -> list[jobs.Job]:
    """Prompts of unlike lengths, from the same hash as the weights."""
    return [
        jobs.Job((uniform_units(number, 0, length, VOCAB_SIZE // 2 - 1) + VOCAB_SIZE // 2).tolist(), NEW_TOKENS)
        for number, length in enumerate(PROMPT_LENGTHS)
    ]


def bits(weights: ExactWeights, *, chunk: int = CHUNK, block_size: int = BLOCK_SIZE) -> str:
    """SHA-256 (hex) over all logits that yield a token, job by job; no argument but the weights can change it."""
    todo = fixed_jobs()
    rows: list[list[bytes]] = [[] for _ in todo]

    def keep(job: int, logits: LogitRows, row: int) -> None:
        rows[job].append(jobs.little_endian(logits.row(row)))

    model = ExactModel(
        weights,
        blocks=jobs.blocks_needed(todo, block_size),
        block_size=block_size,
        positions=max(PROMPT_LENGTHS) + NEW_TOKENS,
    )
    jobs.run(model, todo, block_size, chunk, keep)
    digest = hashlib.sha256()
    for job in rows:
        for row in job:
            digest.update(row)
    return digest.hexdigest()


def weights_on(backend: str, device: str) -> ExactWeights:
    """The self-test's weights in a library; raises ImportError or `ModelError`."""
    arrays: Arrays = NumpyArrays()
    if backend == "torch":
        from engine_stub.model.torch_arrays import TorchArrays  # noqa: PLC0415 - only where torch is

        arrays = TorchArrays(device)
    return load(shape(), HashedTensors(0), arrays)
