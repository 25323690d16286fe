# One virtual environment in .venv, rebuilt when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
FUZZ_CASES ?= 10000
KILLS ?= 20
SOAK_MINUTES ?= 60
SOURCES := $(wildcard src tests scripts benchmarks examples docs/hooks)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow fuzz kills soak lint format docs docs-serve clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

install: $(STAMP) ## create .venv and install the package with its development tools

demo: install ## quantize the embedded model on the embedded images
	$(BIN)/aphq demo

test: install ## run the tests, without the slow ones and those that need a GPU
	$(BIN)/python -m pytest

test-slow: install ## run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu"

fuzz: install ## damaged and forged files of every kind, FUZZ_CASES of them, new ones each time
	APHQ_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest tests/fuzz --hypothesis-show-statistics

kills: install ## kill runs at random moments, KILLS times, and hold what comes out against whole ones
	APHQ_KILLS=$(KILLS) $(BIN)/python -m pytest -s tests/test_random_kills.py

soak: install ## random recipes on the embedded model for SOAK_MINUTES, killed, starved and damaged on the way
	$(BIN)/python scripts/soak.py --minutes $(SOAK_MINUTES)

lint: install ## check style (ruff), layout (ruff format) and types (mypy)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy src

format: install ## rewrite the sources in the house layout
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: install ## build the documentation into build/site; a broken link is an error
	$(BIN)/mkdocs build --strict

docs-serve: install ## show the documentation at http://127.0.0.1:8000, rebuilt when it changes
	$(BIN)/mkdocs serve

clean: ## remove caches and build outputs, keep .venv
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
