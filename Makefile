# make demo   host cache against replayed cache, on the bundled models and held-out problems
# make test   lint, types, documentation, tests
# Each sets up .venv first (once; needs pip and Python >= 3.11, nothing else). PYTHON=/path/to/python chooses another one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
# The set-up is done when a stamp of this checkout's path and of both files that decide what is installed lies in $(VENV):
# a .venv from elsewhere (another clone, an older commit) is accepted and completed.
STAMP := $(VENV)/.replayssm-$(shell (pwd; cat pyproject.toml constraints.txt) | cksum | cut -d' ' -f1)

.PHONY: help setup demo test lint format typecheck docs package

help:
	@sed -n '1,3s/^# //p' Makefile; echo 'also: make setup, lint, format, typecheck, docs, package'

setup: $(STAMP)

$(STAMP):
	@if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  if [ -e $(VENV) ]; then echo "error: $(VENV) is there, but $(PY) does not run, or is older than Python 3.11: remove $(VENV), then run make again." >&2; exit 1; fi; \
	  for python in $(PYTHON) python3.11 python3.12 $$(ls -d ~/.pyenv/versions/3.1[12].*/bin/python 2>/dev/null || true) python3 python3.13 python3.14 python; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then echo "error: no Python >= 3.11 with the venv module found: install one (3.11 or 3.12), or run make PYTHON=/path/to/python." >&2; exit 1; fi; \
	  echo "setting up $(VENV) with $$($$found --version) (once; a few minutes)"; \
	  $$found -m venv $(VENV); \
	fi
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@# torch first and alone, so that pip takes the build which this platform offers; its own Triton pin, if any, then wins.
	@$(PY) -m pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@if $(PY) -c 'import importlib.metadata as m, sys; sys.exit(not any(r.startswith("triton") for r in m.requires("torch")))'; \
	  then grep -v '^triton==' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	@$(PY) -m pip install -qq --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[transformers,bench,dev]'
	@rm -f $(VENV)/.replayssm-*; touch $@

# One thread: the models are too small to gain from two, and two that wait for each other stall on a busy machine.
demo: $(STAMP)
	@$(PY) -m replayssm compare --model models/nemotron-h-gsm --model models/qwen3.5-gsm \
	  --format fp32 --format split16 --threads 1 --show-example

test: lint typecheck docs
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

typecheck: $(STAMP)
	@$(PY) -m mypy

# Strictly: a warning is an error. The pages lie in site/.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# sdist and wheel, and the wheel's contract test in an environment of its own (needs the package index).
package: $(STAMP)
	@rm -rf build/clean dist
	@$(PY) -m build --outdir dist . >/dev/null
	@$(PY) -m venv build/clean
	@build/clean/bin/python -m pip install -qq --disable-pip-version-check -c $(VENV)/constraints.txt "$$(ls dist/*.whl)[cli]"
	@cd build/clean && bin/replayssm --version && bin/replayssm info && bin/replayssm check && bin/replayssm plan --model Qwen3.5-4B
