# `make train` and `make test` are all that a new checkout needs; `make help` lists the rest.
#
#   make train ARGS="gate=switch trainer.max_steps=500"   overrides are passed on
#   make test PYTHON=/usr/bin/python3.12                  another interpreter for .venv
#   make test TORCH_INDEX=URL                             package index with other builds of torch, say CPU ones

PYTHON ?= python3
VENV ?= .venv
RECIPE ?= cifar_moe
ARGS ?=
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all lint format types docs lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(READY)  ## make .venv with everything in it (the others do it by themselves)

train: $(READY)  ## train RECIPE (default cifar_moe), with overrides from ARGS
	@$(BIN)/moeflow train +recipe=$(RECIPE) $(ARGS)

test: lint types  ## lint, types, and all tests that are not slow; ARGS go to pytest
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint types  ## the slow tests as well
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy over moeflow/
	$(BIN)/mypy

format: $(READY)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the pages into site/; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

lock: $(READY)  ## resolve constraints.txt anew (needs every supported Python on the PATH)
	$(BIN)/python .ci/lock.py

clean:  ## remove .venv, build outputs and caches; run folders stay
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +

# torch comes first and by itself: nothing after it then has a reason to pull another build of it, and DeepSpeed, which is
# built from source, finds it.  Byte code is compiled at the end, on all cores.
$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "moeflow needs Python 3.10 or newer, and '$(PYTHON)' is `$(PYTHON) --version 2>&1 || echo not there`."; \
	  echo "  mend: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "  mend: install the venv module of $(PYTHON) (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Setting up $(VENV), about two minutes the first time: torch ..."
	@$(PIP) install -qq --upgrade -c constraints.txt pip
	@$(PIP) install -qq --no-compile -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "  ... moeflow and all it uses ..."
	@$(PIP) install -qq --no-compile -c constraints.txt setuptools wheel ninja
	@$(PIP) install -qq --no-compile -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "  ... byte code ..."
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # some packages carry templates that do not parse
	@touch $@
