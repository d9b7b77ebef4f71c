# Every target sets up what it needs in a virtual environment. To make a second one:
#   make test VENV=.venv312 PYTHON=python3.12 JAX='jax==0.11.2'
PYTHON ?= python3
VENV ?= .venv
# Requirements that narrow those of pyproject.toml, for example one version of JAX.
JAX ?=
# Extras of pyproject.toml to install.
EXTRAS ?= dev
# Processes that run test files side by side; 0 runs all in one.
WORKERS ?= 2
PYTEST_ARGS ?=
# Beginnings of the names of the notebooks to run; none: all.
NOTEBOOKS ?=

BIN := $(VENV)/bin
# Named after what was asked for, so that another pin installs again.
empty :=
READY := $(VENV)/.ready-$(subst $(empty) $(empty),_,$(strip $(EXTRAS) $(subst ==,-,$(JAX))))
# A worker that crashes ends the run: pytest-xdist can wait for its tests for ever.
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart 0

.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY)  ## make the virtual environment

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' $(JAX)
	rm -f $(VENV)/.ready-*
	touch $@

demo: $(READY)  ## write with the bundled model: plain, sparse, speculative, both
	@for flags in "" "--retention 0.1" "--speculative-tokens 3 --draft-loops 2" \
	    "--retention 0.1 --speculative-tokens 3 --draft-loops 2"; do \
	  echo "== sparse-loop generate \"Our relations with Great Britain\" --max-new-tokens 48 --dtype float32 $$flags"; \
	  $(BIN)/sparse-loop generate "Our relations with Great Britain" --max-new-tokens 48 --dtype float32 $$flags || exit 1; \
	done
	@echo "== What carries over from here are the counts. This model is so small that no memory is"
	@echo "   waited for: docs/benchmarks.md has what a GPU gains. Two of four loops stay dense, so a"
	@echo "   retention of 0.1 reads over half of the keys."

# The bundled model is measured again where its files are not those of the last time; minutes.
TINY := sparse_loop_jax/data/tiny-ouro
MEASURED := docs/figures/tiny-ouro
BENCH ?= $(wildcard benchmarks/results/h200.json)

figures: pictures  ## draw the pictures of the documentation, and run the notebooks
	@$(MAKE) --no-print-directory notebooks

pictures: $(READY)
	@mkdir -p docs/figures
	@sha256sum --check --status $(MEASURED).sha256 2>/dev/null || { \
	  echo "== measuring the bundled model"; \
	  $(BIN)/sparse-loop evaluate --dtype float32 --windows 32 --prompts 16 --batch 16 \
	      --acceptance --json $(MEASURED).json && \
	  sha256sum $(TINY)/model.safetensors $(TINY)/heldout.txt $(TINY)/hops.jsonl \
	      > $(MEASURED).sha256; }
	$(BIN)/python -m sparse_loop_jax.evaluate.plots $(MEASURED).json --out docs/figures \
	    $(addprefix --bench ,$(BENCH))

notebooks: $(READY)  ## run the notebooks, each .py into an .ipynb with its outputs
	@$(BIN)/python -c 'import nbclient, ipykernel' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS),notebooks]' $(JAX)
	$(BIN)/python notebooks/make.py $(NOTEBOOKS)

test: $(READY)  ## run the tests, but for the slow ones
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(READY)  ## run the slow tests: minutes, gigabytes of disk
	$(PYTEST) -m slow $(PYTEST_ARGS)

lint: $(READY)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)  ## format, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built and cached, not the environments
	rm -rf build dist out .jax_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -type d -prune -exec rm -rf {} +

.PHONY: help setup demo figures pictures notebooks test test-slow lint types format clean
