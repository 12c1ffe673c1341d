"""`make bench`: decisions, codecs, and the whole gateway beside a peer. Ratios are what counts."""

import runpy
import sys

for module in ("tests.bench.bench_decision", "tests.bench.bench_wire", "tests.bench.bench_gateway"):
    print(f"== {module}", flush=True)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__")
