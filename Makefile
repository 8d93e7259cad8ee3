# `make help` lists what there is. Everything happens in an environment of its own, $(VENV); nothing else is touched.

PYTHON ?= python3
VENV ?= .venv
# The torch that is developed and tested against, and any options of pip's behind it. On a machine without a GPU
# `--index-url` with PyTorch's index of CPU builds saves several gigabytes, unless pip finds a CPU build by itself.
TORCH ?= torch==2.13.0
# A developer wants to see a build fail; `auto` goes on without the extension, as an install does.
FASTPIPE_BUILD_EXT ?= 1
# The build for GPUs has an environment of its own, with the oldest torch that is supported.
VENV_CUDA ?= .venv-cuda
TORCH_CUDA ?= torch==2.11.0
RANKS ?= 4
ARGS ?=
# The tests: which (files or folders; by default what the target says), over how many processes, and the nightly's order.
# More processes than cores: tests wait half of their time, for other processes and for timeouts.
TESTS ?=
WORKERS ?= 4
SEED ?= $(shell date +%s)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SAY := @printf '\033[1m== %s\033[0m\n'
RECORD := fastpipe/_build_info.json
TORCH_VERSION := $(VENV)/lib/python3*/site-packages/torch/version.py
BUILD_INPUTS := setup.py $(wildcard building/*.py csrc csrc/* csrc/*/* $(RECORD) $(TORCH_VERSION))
CPP = $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh tests/*/*.h tests/*/*.cpp tests/*/*/*.h tests/*/*/*.cpp benchmarks/*.cpp)
STAMPS := $(VENV)/stamps

export FASTPIPE_BUILD_EXT
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
# A file of tests stays with one worker, as its fixtures may be expensive; tests/conftest.py puts the longest first. A
# worker that ends early is not replaced: its files would be handed out anew, and the run then waits for ever for a
# file that was through.
BY_FILE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(BY_FILE)

.PHONY: help setup build demo test test-full test-nightly lint types format clean cuda-build FORCE

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' RANKS=$(RANKS) ARGS='...' TESTS='...' WORKERS=$(WORKERS)"

demo: build  ## train a small GPT over four pipeline ranks on this machine (ARGS='--schedule 1f1b')
	$(SAY) "training over $(RANKS) pipeline ranks"
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: build  ## run the tests that matter most, those of tests/quick.txt (TESTS=tests/unit ARGS='-k lower')
	$(SAY) "running the quick tests"
	$(PYTEST) $(or $(TESTS),@tests/quick.txt) $(ARGS)

test-full: build  ## run all tests but the nightly ones
	$(SAY) "running the tests"
	$(PYTEST) $(TESTS) $(ARGS)

# All of them in a random order and with examples that Hypothesis has not tried, then those that take long or measure.
# SEED=... repeats an order.
test-nightly: build  ## run everything: fresh examples, a random order, long runs, latencies (an idle machine, please)
	$(SAY) "running the tests in the order of SEED=$(SEED)"
	$(PYTEST) --fresh-examples --shuffle $(SEED) $(TESTS) $(ARGS)
	$(SAY) "running the nightly tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly $(TESTS) $(ARGS)
	@if command -v nvcc >/dev/null || [ -n "$$CUDA_HOME" ]; then \
	  $(MAKE) --no-print-directory cuda-build HOST_CUDA_TESTS=tests/gpu; \
	else echo "NOT RUN: the CUDA build, as there is no nvcc"; fi

setup: $(STAMPS)/package  ## make the environment: torch, the tools, fastpipe itself (from this very folder)

build: $(STAMPS)/build  ## compile what changed in csrc/

lint: build  ## check style and formatting, and that generated pages are current
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	@for page in schedules waves readme layout choosing; do $(BIN)/python docs/write_$$page.py --check || exit 1; done

types: setup  ## check types
	$(BIN)/mypy

format: setup  ## rewrite files in the project's format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

# Beside the build in this folder, which is for another torch: everything goes into build/cuda. The tests are those that
# may go wrong with another torch, or with the library for GPUs.
CUDA_TESTS ?= tests/distributed/test_sharded_training.py $(addprefix tests/runtime/test_, all_to_all.py bits.py \
  checkpoint.py clip.py failure.py gpu_benchmarks.py native_core.py native_core_process_group.py pairs.py \
  random_numbers.py recording.py shared_memory.py step.py streams.py tied.py torch_private.py weight_grad.py \
  weight_grad_of_a_stage.py)
# What needs a GPU runs over CUDA on the host (tests/host_cuda): each transport, recorded steps, schedules of each kind.
# HOST_CUDA_TESTS=tests/gpu is all of it, HOST_CUDA_TESTS='tests/gpu -k killed' what one asks for. HOST_CUDA_LOSSES are
# tests for any device: ranks are lost where messages go over NCCL.
HOST_CUDA_TESTS ?= tests/gpu -k "driver or cannot or current or failed or killed or (recorded and 1f1b) or \
  (one_process and (1f1b or zbv or dualpipev)) or \
  ((dualpipev or zbv) and (2-cuda_ipc or process_group-2 or coalesced-2)) or \
  (owed and (0-process_group or 1-cuda_ipc))"
HOST_CUDA_LOSSES ?= tests/distributed/test_death.py -k "native and (killed or silent)"
CUDA_PYTHON = $(abspath $(VENV_CUDA))/bin/python

cuda-build:  ## build for GPUs (with nvcc; no GPU is needed), import it, and run tests, those of GPUs over CUDA on the host
	@command -v nvcc >/dev/null || [ -n "$$CUDA_HOME" ] || \
	  { echo "There is no CUDA toolkit: install one (nvcc), or set CUDA_HOME to its folder"; exit 1; }
	@$(MAKE) --no-print-directory VENV=$(VENV_CUDA) TORCH='$(TORCH_CUDA)' $(VENV_CUDA)/stamps/torch
	@FASTPIPE_BUILD_EXT=0 $(CUDA_PYTHON) -m pip --disable-pip-version-check install --quiet \
	  'setuptools>=77,<82' ninja numpy 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'hypothesis>=6.100'
	$(SAY) "building for CUDA, against $(TORCH_CUDA)"
	@PATH="$(abspath $(VENV_CUDA))/bin:$$PATH" $(CUDA_PYTHON) setup.py --quiet build --build-base build/cuda
	$(SAY) "importing it, and running tests"
	@export PYTHONSAFEPATH=1 PYTHONPATH="$$(echo $(CURDIR)/build/cuda/lib*):$(CURDIR)" FASTPIPE_REQUIRE_NATIVE=1; \
	$(CUDA_PYTHON) -c 'from fastpipe.runtime import native; runtime = native.load(); print(native.native_status()); \
	  raise SystemExit(None if runtime and runtime.has_cuda else "built without CUDA: this torch has none")' && \
	$(CUDA_PYTHON) -m pytest $(BY_FILE) --import-mode=append $(CUDA_TESTS) $(ARGS)
	$(SAY) "running the tests of GPUs over CUDA on the host"
	@export PYTHONSAFEPATH=1 PYTHONPATH="$$(echo $(CURDIR)/build/cuda/lib*):$(CURDIR)" FASTPIPE_REQUIRE_NATIVE=1; \
	export HOST_CUDA_DEVICES=2; \
	$(CUDA_PYTHON) -m tests.host_cuda $(CUDA_PYTHON) -m pytest $(BY_FILE) --import-mode=append $(HOST_CUDA_TESTS) && \
	export FASTPIPE_TEST_DEVICE=cuda && \
	$(CUDA_PYTHON) -m tests.host_cuda $(CUDA_PYTHON) -m pytest --import-mode=append $(HOST_CUDA_LOSSES)

clean:  ## remove what was built, caches and the environment
	rm -rf $(VENV) $(VENV_CUDA) build dist *.egg-info fastpipe/*.so $(RECORD)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Set-up in four steps, each with a stamp, so that it costs nothing when nothing changed.

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "fastpipe needs Python 3.11 or newer, and $(PYTHON) is not: set PYTHON=python3.11, say"; exit 1; }
	$(SAY) "making an environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make an environment (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# The stamp holds what was asked for, so that another TORCH replaces the one that is there.
ifneq ($(shell cat $(STAMPS)/torch 2>/dev/null),$(TORCH))
$(STAMPS)/torch: FORCE
endif
$(STAMPS)/torch: $(STAMPS)/venv
	$(SAY) "installing $(TORCH) (the longest step)"
	@$(PIP) $(TORCH) || { \
	  echo "Could not install $(TORCH). Set another release, or an index to take it from, as in"; \
	  echo "  make $(MAKECMDGOALS) TORCH='torch==2.13.0 --index-url ADDRESS'"; \
	  echo "(fastpipe needs torch>=2.11)."; exit 1; }
	@echo "$(TORCH)" > $@

# No build isolation, since the tools are here already; the extension is left to `make build`, which is incremental.
$(STAMPS)/package: $(STAMPS)/torch pyproject.toml
	$(SAY) "installing the tools and fastpipe (editable)"
	@$(PIP) 'setuptools>=77' ninja
	@FASTPIPE_BUILD_EXT=0 $(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# Also when something else was built into this tree (the record is newer), or torch was replaced by hand; and as long as
# a library is missing.
ifneq ($(shell grep -c '"built": false' $(RECORD) 2>/dev/null),0)
$(STAMPS)/build: FORCE
endif
$(STAMPS)/build: $(STAMPS)/package $(BUILD_INPUTS)
	$(SAY) "building the native libraries (the first time takes a minute or more)"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

FORCE:
