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

# Minutes to an hour. Its dated results are kept in docs/results/.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# docs/models.md: which model families share rows, and how exactly.
models: $(READY)
	$(BIN)/memopd models --output docs/models.md
