# Every target prepares what it needs: .venv with the tools of pyproject.toml, then the build.
#
#   make demo ARGS='--heads 16'      arguments of a command
#   make test SANITIZE=1             the same under ASan and UBSan; DEBUG=1 likewise
#   make test PYTHON=python3.13      another interpreter, for a .venv that is not there yet

PYTHON ?= python3
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

# A variant is tested from its own build folder, everything else from the source tree. Safe path
# keeps `python -m` from preferring the source tree then.
on = $(filter-out 0,$($(1)))
VARIANT := $(if $(call on,DEBUG),debug,$(if $(call on,SANITIZE),sanitize,release))
PACKAGE := $(CURDIR)$(if $(filter-out release,$(VARIANT)),/build/$(VARIANT)/python)
ENVIRONMENT := PYTHONSAFEPATH=1 PYTHONPATH=$(PACKAGE)
ifeq ($(VARIANT),sanitize)
# Python is not instrumented: the runtime comes first; leaks are left to the C tests.
ENVIRONMENT += PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)"
endif

C_FOLDERS := csrc csrc/cpu csrc/python tests/c examples/c
C_TESTS := $(filter-out fuzz_%,$(notdir $(basename $(wildcard tests/c/*.c))))
C_EXAMPLES := $(notdir $(basename $(wildcard examples/c/*.c)))

.DEFAULT_GOAL := help
.NOTPARALLEL: # ninja is parallel, and two of them would write one folder
.PHONY: help build demo test test-c examples-c sanitize fuzz bench lint format frameworks \
    lib install-lib wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1 — /p' $(MAKEFILE_LIST)

# ---- Environment and build ---------------------------------------------------------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is not Python 3.11 or later: make PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "no virtual environments? apt install python3-venv" >&2; exit 1; }

# .venv/<group>.txt is what is installed of that group of pyproject.toml.
$(VENV)/%.txt: pyproject.toml buildtools/requirements.py | $(VENV)/bin/python
	@$(PY) buildtools/requirements.py $* > $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check -r $@.part
	@mv $@.part $@

frameworks: $(VENV)/frameworks.txt ## install PyTorch and JAX, for the tests and benchmarks to use

build: $(VENV)/test.txt ## compile the extension into the source tree, only what changed
ifeq ($(VARIANT),release)
	@$(PY) setup.py -q build_ext --inplace
else
	@$(PY) setup.py -q build
endif

# ---- Use ---------------------------------------------------------------------------------------

demo: build ## a continuous-batching run over a real text
	@$(ENVIRONMENT) $(PY) -m sparse_mla demo $(ARGS)

bench: build ## the benchmark tables, beside PyTorch after `make frameworks`
	@$(ENVIRONMENT) $(PY) -m sparse_mla bench $(ARGS)

# ---- Tests -------------------------------------------------------------------------------------

test: test-c examples-c build ## C tests, C examples, then the Python tests
	@$(ENVIRONMENT) SMLA_EXPECT_ROOT=$(PACKAGE) $(PY) -m pytest $(ARGS)

test-c: $(VENV)/test.txt ## the C tests alone
	@$(PY) setup.py -q ninja --targets=tests
	@for test in $(C_TESTS); do \
	    echo "tests/c/$$test"; build/$(VARIANT)/tests/$$test || exit 1; done

examples-c: lib ## compile and run the C examples against build/lib, as a user would
	@if command -v $(CXX) > /dev/null; then $(CXX) -std=c++17 -Wall -Wextra -Wpedantic -Werror \
	    -fsyntax-only -Ibuild/lib/include tests/c/header.cpp; fi
	@for example in $(C_EXAMPLES); do echo "examples/c/$$example"; \
	    $(CC) -std=c11 -Wall -Wextra -Werror -Ibuild/lib/include examples/c/$$example.c \
	        -o build/$$example -Lbuild/lib -Wl,-rpath,$(CURDIR)/build/lib -lsparse_mla -lm && \
	    build/$$example || exit 1; done

sanitize: ## all tests under ASan and UBSan
	@$(MAKE) test SANITIZE=1

fuzz: $(VENV)/test.txt ## libFuzzer on the argument checks, for FUZZ_SECONDS=60
	@command -v clang > /dev/null || \
	    { echo "fuzzing needs clang and its runtime: apt install clang libclang-rt-dev" >&2; exit 1; }
	@FUZZ=1 CC=clang $(PY) setup.py -q ninja --targets=fuzz
	@mkdir -p build/fuzz/corpus
	build/fuzz/fuzz/fuzz_check -max_total_time=$(FUZZ_SECONDS) -verbosity=0 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus

# ---- Quality -----------------------------------------------------------------------------------

# clang-tidy learns from assertions; it comes without an omp.h.
TIDY_FLAGS := --extra-arg=-UNDEBUG --extra-arg=-fno-openmp

lint: build $(VENV)/lint.txt ## formatting, ruff, clang-tidy, and the stubs against the extension
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard $(addsuffix /*.[ch],$(C_FOLDERS)))
	@echo clang-tidy
	@printf '%s\n' $(wildcard $(addsuffix /*.c,$(filter-out examples/c,$(C_FOLDERS)))) | \
	    xargs -n 1 -P "$$(nproc)" $(VENV)/bin/clang-tidy --quiet -p . $(TIDY_FLAGS)
	$(ENVIRONMENT) $(PY) -m mypy.stubtest sparse_mla

format: $(VENV)/lint.txt ## rewrite Python and C in the project's format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(wildcard $(addsuffix /*.[ch],$(C_FOLDERS)))

# ---- Products ----------------------------------------------------------------------------------

lib: $(VENV)/test.txt ## build/lib: libsparse_mla.a and .so, headers, pkg-config file
	@env -u DEBUG -u SANITIZE $(PY) setup.py -q ninja --targets=lib

install-lib: lib ## copy them to PREFIX=/usr/local
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	cp -P build/lib/libsparse_mla.* $(DESTDIR)$(PREFIX)/lib
	cp -R build/lib/include/. $(DESTDIR)$(PREFIX)/include
	sed -e 's|^prefix=.*|prefix=$(PREFIX)|' -e 's|^libdir=.*|libdir=$${prefix}/lib|' \
	    build/lib/pkgconfig/sparse_mla.pc > $(DESTDIR)$(PREFIX)/lib/pkgconfig/sparse_mla.pc

wheel: $(VENV)/test.txt ## sdist, and from it in isolation an abi3 wheel, in dist/
	rm -rf dist
	@$(PY) setup.py -q sdist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist dist/*.tar.gz

clean: ## remove everything built; .venv stays
	rm -rf build dist *.egg-info sparse_mla/include sparse_mla/_C*.so compile_commands.json
