# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PYTHON ?= python3
TORCH ?= torch==2.13.0 triton==3.9.0

.PHONY: help setup setup-torch demo test lint types protos bench bench-scheduling test-peers docs clean

help: ## this list
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## virtual environment in .venv with pinned dependencies (no torch)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

setup-torch: $(STAMP) ## adds torch to .venv, for the torch backend and its tests
	$(BIN)/python -m pip install --quiet $(TORCH)

demo: $(STAMP) ## gateway + 4 ranks + real traffic on free loopback ports; KEEP=1 stays up, PROTOCOL=vllm|tokenspeed, ENGINE=synthetic
	$(BIN)/python -m tools.demo $(if $(KEEP),--keep) $(if $(PROTOCOL),--protocol $(PROTOCOL)) $(if $(ENGINE),--backend $(ENGINE))

test: $(STAMP) ## the whole test suite
	$(BIN)/python -m pytest

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

$(PEERS)/.installed: tests/peers/requirements.lock
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --require-hashes --only-binary :all: -r $<
	@touch $@

test-peers: $(STAMP) $(PEERS)/.installed ## a real router in front of the gateway (own virtual environment in .venv-peers)
	$(BIN)/python -m pytest -m peers tests/peers

docs: $(STAMP) ## regenerate the generated docs and the JSON schema
	$(BIN)/python -m tools.generate

clean: ## remove what the targets above made
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
