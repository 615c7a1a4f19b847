# Everything a developer or a newcomer runs. `make` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install --quiet --constraint constraints.txt

# One torch thread per process: the matrices of the tests are small.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2

.PHONY: help setup demo serve test mutants soak bench table check lint types floors size fresh docs fix clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

# -- installation ---------------------------------------------------------------------------------
# Two stamps: what the demonstration needs, and on top of it what developers need. A changed pin or
# dependency list makes them stale; an up-to-date stamp makes `make setup` return at once.

setup: $(VENV)/.dev ## virtual environment in .venv with everything, tests and docs included

$(VENV)/.demo: pyproject.toml constraints.txt tools/setup_note.py
	@$(PYTHON) tools/setup_note.py --torch $(TORCH_PIN) --venv $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@env $${TORCH_INDEX_URL:+PIP_INDEX_URL="$$TORCH_INDEX_URL"} $(INSTALL) torch==$(TORCH_PIN)
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing the tools of developers (tests, linters, documentation)"
	@$(INSTALL) --editable '.[dev]'
	@touch $@

# -- use ------------------------------------------------------------------------------------------

demo: $(VENV)/.demo ## load, serve and question the shipped nano model, end to end
	@$(BIN)/emberbox demo

serve: $(VENV)/.demo ## serve the shipped nano model on this machine
	@$(BIN)/emberbox serve models/ember-nano

# -- checks ---------------------------------------------------------------------------------------

test: $(VENV)/.dev ## the tests that need no GPU (ARGS="-k name" narrows them)
	@$(PYTEST) --numprocesses $(WORKERS) $(ARGS)

mutants: $(VENV)/.dev ## known mistakes, made one at a time: every one must be caught
	@$(BIN)/python tools/mutants.py --fast --write docs/mutants.md

soak: $(VENV)/.dev ## slow tests, then 5,000 random schedules through the real engine (hours)
	@$(PYTEST) -m "slow and not gpu"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.engine_schedules --schedules 5000

bench: $(VENV)/.dev ## speed of the engine on this machine against its bars; writes a receipt
	@$(BIN)/python -m benchmarks.engine

table: $(VENV)/.demo ## pages and summaries of receipts/ from the receipts, every one verified
	@$(BIN)/python tools/table.py
	@$(BIN)/python -m tools.summarise

check: lint types floors size fresh docs test ## all that CI demands of a change; ends with the tests

lint: $(VENV)/.dev ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(VENV)/.dev ## mypy --strict over src
	@$(BIN)/mypy

floors: $(VENV)/.dev ## who may import whom
	@$(BIN)/lint-imports --no-logo --no-cache

size: $(VENV)/.demo ## lines per part, file and function against budgets.toml
	@$(BIN)/python tools/size.py

fresh: $(VENV)/.demo ## generated reference pages, tables and summaries of receipts are up to date
	@$(BIN)/python tools/generate.py --check
	@$(BIN)/python tools/table.py --check
	@$(BIN)/python -m tools.summarise --check

docs: $(VENV)/.dev ## strict build of the documentation; its commands are executed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@$(BIN)/python tools/run_docs.py

fix: $(VENV)/.dev ## ruff's safe fixes and format; regenerated reference pages
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/python tools/generate.py

clean: ## remove the virtual environment and everything built
	@rm -rf $(VENV) .build build dist
