# `make` lists what there is. Two ways to run everything:
#   make test                           sets up .venv with the first Python 3.11+ found, builds, runs
#   make test PYTHON=python3.12 VENV=   uses that interpreter and the packages it has; builds into build/site
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
REPORT ?= reports/gpu

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; done)
endif

# Without this `python -m` would find the bare sources in ./streampool before the built package.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
BIN := build/site/bin
TOOLS := build/.tools
BUILT := build/.site
export PYTHONPATH := $(CURDIR)/build/site$(if $(PYTHONPATH),:$(PYTHONPATH))
INSTALL := install --target build/site --upgrade
else
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
BUILT := $(VENV)/.built
INSTALL := install --force-reinstall
endif
LINT := $(dir $(TOOLS)).lint
BENCH := build/bench/.built
CMAKE := $(PY) -m cmake
CLANG_FORMAT := $(if $(strip $(VENV)),$(BIN)/)clang-format
NINJA := $(if $(strip $(VENV)),-DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)")
CPP_FILES := git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h'
comma := ,

SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE \
  $(shell find native streampool examples benchmarks/native -type f -not -path '*/__pycache__/*' -not -name '*.so' 2>/dev/null)

# Prints requirements that stand in pyproject.toml, so that they stand only there.
REQUIREMENTS := import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb")); j = p["project"]; \
  print(*(r for k in sys.argv[1:] for r in (p["build-system"]["requires"] + ["cmake>=3.24", "ninja>=1.11"] if k == "build" \
    else j["dependencies"] if k == "run" else j["optional-dependencies"][k])), sep="\n")

.PHONY: help demo test test-slow test-gpu wheel lint format sanitize asan tsan bench bench-build bench-pairs tables \
  clean build

help:  ## what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(BUILT)  ## find planted faults, then replay a real trace; on the GPU where there is one
	$(BIN)/streampool demo --examples examples

test: $(BUILT)  ## every fast test, native ones included (no GPU needed)
	$(PY) -m pytest -n $(JOBS) --durations=10 --durations-min=1 -m "not slow and not gpu" $(ARGS)

test-slow: $(BUILT)  ## the longer tests, which CI runs
	HYPOTHESIS_PROFILE=ci $(PY) -m pytest -n $(JOBS) --dist loadgroup -m "slow and not gpu" $(ARGS)

test-gpu: $(BUILT)  ## the GPU suite; its report goes to REPORT=folder. A skipped gpu test is a failure
	CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH="$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $(PY) -m pytest -p gpu_report --gpu-report "$(REPORT)" -m gpu $(ARGS)

build: $(BUILT)

wheel: $(TOOLS)  ## a wheel in dist/ that installs without a compiler
	rm -rf build/wheelhouse && mkdir -p build/wheelhouse dist
	$(PY) -m pip wheel -q --no-build-isolation --no-deps -C build-dir="build/wheel-{wheel_tag}" -w build/wheelhouse .
	if [ "$$(uname -s)" = Linux ] && $(PY) -c 'import auditwheel' 2>/dev/null; then \
	  PATH="$$PWD/$(BIN):$$PATH" $(PY) -m auditwheel repair -w dist build/wheelhouse/*.whl; \
	else cp build/wheelhouse/*.whl dist/; echo "auditwheel is not installed: the wheel in dist/ fits this machine"; fi

lint: $(LINT)  ## ruff, mypy, clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CPP_FILES) | xargs $(CLANG_FORMAT) --dry-run --Werror

format: $(LINT)  ## put Python and C++ sources into the project's format
	$(PY) -m ruff check --fix-only -q .
	$(PY) -m ruff format .
	$(CPP_FILES) | xargs $(CLANG_FORMAT) -i

sanitize: asan tsan  ## native tests under ASan + UBSan, and under TSan

asan tsan: $(TOOLS)
	$(CMAKE) -S . -B build/$@ -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTREAMPOOL_BUILD_PYTHON=OFF \
	  -DSTREAMPOOL_BUILD_TESTS=ON -DSTREAMPOOL_SANITIZE=$(if $(filter asan,$@),address$(comma)undefined,thread) $(NINJA)
	$(CMAKE) --build build/$@ -j $(JOBS)
	.ci/run-sanitized build/$@/bin/native_tests

bench: bench-build  ## allocators side by side (ARGS="pairs --device sim"): streampool bench, built as users get it
	PYTHONPATH="build/bench$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m streampool bench $(ARGS)

bench-build: $(BENCH)

bench-pairs: $(TOOLS)  ## the C++ program pairs alone, which needs no Python
	$(CMAKE) -S . -B build/pairs -G Ninja -DSTREAMPOOL_BUILD_PYTHON=OFF -DSTREAMPOOL_BUILD_BENCHMARKS=ON $(NINJA)
	$(CMAKE) --build build/pairs -j $(JOBS)
	build/pairs/benchmarks/pairs $(ARGS)

tables: bench-build  ## write the tables of benchmarks/README.md and README.md from benchmarks/results
	PYTHONPATH="build/bench$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) tools/bench_tables.py

clean:  ## remove everything that was built, .venv too
	rm -rf build dist reports .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# -- the environment --------------------------------------------------------------------------------------------------
define CHECK
if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
  echo "streampool needs Python 3.11 or newer; found: $$("$(or $(PYTHON),python3)" --version 2>&1). Name one: make ... PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
if ! for c in $${CXX:-c++ g++ clang++}; do command -v "$$c" && break; done >/dev/null; then \
  echo "streampool needs a C++20 compiler: GCC 11 or newer, or Clang 14 or newer. Install one, or name it: CXX=/path/to/g++" >&2; exit 1; fi; \
if ! "$(PYTHON)" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then \
  echo "Python's headers (Python.h) are missing for $(PYTHON): install its development package (python3-dev)." >&2; exit 1; fi
endef

ifeq ($(strip $(VENV)),)
$(TOOLS): pyproject.toml
	@$(CHECK)
	@$(PY) -c 'import importlib.util as u, sys; m = [n for n in ("pip", "scikit_build_core", "nanobind", "cmake", "pytest") \
	  if u.find_spec(n) is None]; m and sys.exit("$(PYTHON) lacks " + ", ".join(m) + ": install them, or leave VENV= out")'
	@mkdir -p $(@D) && touch $@
$(LINT): $(TOOLS)
	@touch $@
else
$(TOOLS): pyproject.toml
	@$(CHECK)
	[ -x "$(PY)" ] || "$(PYTHON)" -m venv "$(VENV)"
	$(PY) -c '$(REQUIREMENTS)' build run test wheel > $(VENV)/requirements.txt
	$(PY) -m pip install -q -r $(VENV)/requirements.txt
	@touch $@
$(LINT): $(TOOLS)
	$(PY) -c '$(REQUIREMENTS)' lint > $(VENV)/requirements-lint.txt
	$(PY) -m pip install -q -r $(VENV)/requirements-lint.txt
	@touch $@
endif

# The package as users get it, without the tests' switches.
$(BENCH): $(TOOLS) $(SOURCES)
	$(PY) -m pip install --target build/bench --upgrade -q --no-build-isolation --no-deps \
	  -C build-dir="build/users-{wheel_tag}" .
	@touch $@

# The package with its native tests, as a unity build: sources are compiled several at a time, in half the time.
$(BUILT): $(TOOLS) $(SOURCES)
	$(PY) -m pip $(INSTALL) -q --no-build-isolation --no-deps -C build-dir="build/test-{wheel_tag}" \
	  -C cmake.define.STREAMPOOL_BUILD_TESTS=ON -C cmake.define.CMAKE_UNITY_BUILD=ON .
	@touch $@
