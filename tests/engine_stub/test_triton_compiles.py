"""Every Triton kernel compiles for an H100-class GPU (sm_90), which needs no GPU; products use its tensor cores."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.models import NO_TORCH, NO_TRITON

pytest.importorskip("torch", reason=NO_TORCH)

# Sizes of the 8B shape in bfloat16; pointers and widths are multiples of 16, as they are at run time.
SCRIPT = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine_stub.model import triton_kernels as kernels

F32, INT, LONG = "*fp32", "*i32", "*i64"
HEADS = {"HEADS": 32, "HEAD_DIM": 128, "DIMS": 128, "SPLIT": 512}
ATTENTION = HEADS | {"KV_HEADS": 8, "PAGE": 16, "KEYS": 64, "UPCAST": False}
TILES = dict.fromkeys(("tables", "tile_item", "tile_row", "tile_count", "tile_position"), INT)
PARTIAL = dict.fromkeys(("out", "largest", "total"), F32)
ROTATION = {"cosine": F32, "sine": F32, "positions": LONG, "writes": LONG}
LINEAR = {"BLOCK_ROWS": 64, "BLOCK_WIDTH": 64, "BLOCK_INNER": 64, "UPCAST": False}
CASES = [
    ("rms_norm", {}, {"HAS_DELTA": True, "BLOCK": 4096}),
    ("rotate_store", ROTATION, {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64}),
    ("swiglu", {}, {"BLOCK": 1024}),
    ("paged_attention", TILES | PARTIAL, ATTENTION | {"PARTIAL": True, "ROWS": 16}),
    ("paged_attention", TILES, ATTENTION | {"PARTIAL": False, "ROWS": 64}),
    ("reduce_splits", {"partial": F32, "largest": F32, "total": F32, "positions": LONG}, HEADS),
    ("linear", {}, LINEAR),
]
SCALARS = {"width": "i32", "inner": "i32", "rows": "i32", "splits": "i32", "table_width": "i32"}
SCALARS |= {"epsilon": "fp32", "scale": "fp32"}
results = []
for name, pointers, constants in CASES:
    kernel = getattr(kernels, name)
    kinds, even = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        kinds[argument] = "constexpr" if argument in constants else SCALARS.get(argument, pointers.get(argument, "*bf16"))
        if kinds[argument].startswith("*") or argument in ("width", "inner"):
            even[place,] = [["tt.divisibility", 16]]
    known = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=known, attrs=even)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    code = made.asm["ptx"]
    results.append([name, len(made.asm["cubin"]), "mma" in code, "cp.async" in code, made.metadata.shared])
print(json.dumps(results))
"""


def test_kernels_compile_for_sm_90(tmp_path):
    pytest.importorskip("triton", reason=NO_TRITON)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 7
    for name, size, has_tensor_cores, has_async_copies, shared_bytes in results:
        is_product = name in ("paged_attention", "linear")
        assert size > 1000
        assert has_tensor_cores == is_product
        assert has_async_copies == is_product
        assert shared_bytes < 100 * 1024
