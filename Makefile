# Two commands on a fresh machine: `make quickstart` and `make test`. Both set up first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/memopd/vllm
TRL := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/memopd/trl
CLIENTS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/memopd/clients

.PHONY: setup quickstart test test-slow test-vllm test-trl test-clients lint models

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv: downloads torch, transformers and others, which takes some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)
	@echo "Ready. For the memopd command: . .venv/bin/activate"

# Rollouts, audit, a short training, evaluation and a page, in some minutes. A script of plain commands.
quickstart: $(READY)
	@sh examples/quickstart.sh

# A worker more than there are cores, at most four, because tests wait for servers and commands; each takes whole files.
# Then, if there is a GPU, one by one the tests that need the whole of it.
WORKERS = $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() + 1))")
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/gpu
	@if command -v nvidia-smi > /dev/null; then $(BIN)/python -m pytest tests/gpu; fi

# About an hour. Commit the dated results that it writes.
test-slow: SHELL := /bin/bash
test-slow: $(READY)
	set -o pipefail; (date -u +%F; MEMOPD_VLLM_PYTHON=$(wildcard $(VLLM)/bin/python) $(BIN)/python -m pytest -m slow -rp --durations=5) 2>&1 | tee tests/results/test-slow.txt

# Tests against real vLLM, in an environment of its own that is kept for the next time.
test-vllm: $(READY)
	@PYTHON="$(PYTHON)" sh tests/vllm/environment.sh "$(VLLM)"; status=$$?; \
	    if [ $$status -eq 3 ]; then exit 0; elif [ $$status -ne 0 ]; then exit $$status; fi; \
	    MEMOPD_VLLM_PYTHON="$(VLLM)/bin/python" $(BIN)/python -m pytest tests/vllm -s

# Tests in TRL's trainer and of the benchmark's peers, in an environment of its own on top of .venv. The folders in tests/
# must not be on the import path there: TRL would take tests/vllm for an installed vLLM.
test-trl: $(READY)
	@sh tests/trl/environment.sh "$(TRL)"; status=$$?; \
	    if [ $$status -eq 3 ]; then exit 0; elif [ $$status -ne 0 ]; then exit $$status; fi; \
	    "$(TRL)/bin/python" -m pytest tests/trl tests/benchmarks/test_peers_bench.py --override-ini pythonpath=. \
	        --import-mode importlib

# Tests with other people's clients and agents, in environments of their own, against a gateway from .venv.
test-clients: $(READY)
	@PYTHON="$(PYTHON)" sh tests/clients/environment.sh "$(CLIENTS)"; status=$$?; \
	    if [ $$status -eq 3 ]; then exit 0; elif [ $$status -ne 0 ]; then exit $$status; fi; \
	    MEMOPD_CLIENTS="$(CLIENTS)" $(BIN)/python -m pytest tests/clients

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# docs/models.md: which model families share rows, and how exactly.
models: $(READY)
	$(BIN)/memopd models --output docs/models.md
