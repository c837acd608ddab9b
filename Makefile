# Two commands on a fresh machine: `make quickstart` and `make test`. Both set up first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup quickstart test test-slow lint models

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

quickstart: $(READY)
	$(BIN)/memopd audit --demo

test: $(READY)
	$(BIN)/python -m pytest

# Minutes to an hour. Its dated results are committed.
test-slow: SHELL := /bin/bash
test-slow: $(READY)
	set -o pipefail; (date -u +%F; $(BIN)/python -m pytest -m slow -rp --durations=5) 2>&1 | tee docs/results/test-slow.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# docs/models.md: which model families share rows, and how exactly.
models: $(READY)
	$(BIN)/memopd models --output docs/models.md
