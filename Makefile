# make run    sets everything up and starts the server: make run ARGS="--port 8000"
# make test   sets everything up and runs the checks of CI: all but the slow tests (test-slow)
#
# PYTHON names the interpreter that .venv is made with; the default is python3, at least 3.11.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

export PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=

# Set-up is done again when any of these changes in content.
SETUP_INPUTS := pyproject.toml constraints.txt Makefile scripts/setup.sh
STAMP := .venv/complete-$(shell cat $(SETUP_INPUTS) | cksum | tr ' ' '-')
BIN := .venv/bin
LINKED := build/linked

.PHONY: run setup test lint types imports tests test-slow format docs completions clean

run: $(STAMP)
	@exec $(BIN)/ktserve run $(ARGS)

setup: $(STAMP)

$(STAMP):
	@rm -f .venv/complete-*
	@scripts/setup.sh $@

test: lint types imports tests

lint: $(STAMP)
	@echo '==> ruff'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@echo '==> mypy'
	@$(BIN)/python scripts/link_tree.py
	@MYPYPATH=$(LINKED) $(BIN)/mypy --package ktserve
	@MYPYPATH=$(LINKED) $(BIN)/mypy scripts/*.py

imports: $(STAMP)
	@echo '==> import contracts'
	@$(BIN)/python scripts/link_tree.py
	@cd $(LINKED) && ../../$(BIN)/lint-imports --no-logo --no-cache ../../pyproject.toml

tests: $(STAMP)
	@echo '==> tests'
	@$(BIN)/python -m pytest -q -m 'not slow' $(PYTEST_ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

format: $(STAMP)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

# What is generated from the declarations; a test fails when one of them is stale.
docs: $(STAMP)
	@$(BIN)/python scripts/settings_table.py
	@$(BIN)/python scripts/api_fields.py

completions: $(STAMP)
	@$(BIN)/python scripts/completions.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
