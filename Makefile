# Two commands do everything from a fresh clone: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first Python from 3.11 to 3.13 on this machine that can make a virtual environment; or PYTHON=… by hand.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written when a module is first imported: compiling all of torch and transformers up front takes longer.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
# Every test that starts a process imports torch: 2.1 s of CPU with bytecode, 4.5 s without.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test lint pytest services notes docs wheel house clean

help:
	@echo "make demo   install the core and predict Llama-3-8B on an H200"
	@echo "make test   install everything for tests, lint, type-check and test"
	@echo "make lint   ruff, mypy and import-linter only"
	@echo "make pytest the tests only (ARGS='tests/unit -x' to choose)"
	@echo "make notes  are the tables of lab/notes those of the recordings?"
	@echo "make wheel  build the wheel, check its size, run it in an empty environment"
	@echo "make house  print how the code is cut"
	@echo "make docs   the documentation as a site that needs no network: site/index.html"
	@echo "make clean  remove the environment and the caches"

demo: $(VENV)/.core
	$(BIN)/ridgeline predict llama3-8b --on h200

test: lint pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

ARGS ?= -m "not gpu" --ignore=tests/gpu
JOBS ?= 2
pytest: $(VENV)/.test services
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# A browser and a database for the tests that draw pages and keep results; without root those tests are skipped.
services:
	@{ command -v chromium && ls -d /usr/lib/postgresql/*/bin; } >/dev/null 2>&1 || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium postgresql >/dev/null; } \
	|| echo "make: no chromium or PostgreSQL here: their tests are skipped" >&2

notes: $(VENV)/.test
	$(BIN)/python -m lab.notes --check

wheel: $(VENV)/.core
	$(BIN)/python -m lab.wheel

house: $(VENV)/.core
	$(BIN)/python -m lab.house

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.13 with venv found: install one, or say PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml requirements/core.txt
	$(PIP) -r requirements/core.txt
	$(PIP) --no-deps --editable .
	@touch $@

# torch goes first and alone: its exact pin is what brings the CPU build where one is offered. The rest is a full
# closure, so that nothing is resolved and nothing is pulled in behind our back.
$(VENV)/.test: $(VENV)/.core requirements/torch.txt requirements/test.txt
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps -r requirements/test.txt
	@touch $@

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
