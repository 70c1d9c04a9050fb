# A thin front: everything is CMake presets and scripts/.
#
#   make demo [INPUT=file]   a Mixture-of-Experts layer on 8 ranks (GPUs, else CPU), checked against the reference
#   make test [T='Dispatch*']  the plain C++ and Python tests, or those of these names
#   make check               sanitizers, GPU code, clang-tidy and the other gates of sources; with `make test`, what CI runs
#   make test-all            every test: all of the sanitizers, RoCE in emulated machines, the wheel, 1,000 faults
#   make bench               how fast dispatch and combine are here
#   make wheel               build/wheels: the Python package, to be installed on other machines, and its sources
#   make docs                build/docs/html: these pages and the reference of C++ and Python
#   make format | lint       clang-format over the sources | check that, and clang-tidy over what has changed
#   make clean

# Where there are GPUs and a compiler for them, they are used.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && scripts/cuda_environment >/dev/null 2>&1 && echo yes)
PRESET := $(if $(GPU),cuda,host)
quoted = '$(subst ','\'',$(1))'

.DEFAULT_GOAL := help
.PHONY: help demo test check test-all bench wheel docs format lint clean

help:
	@sed -n 's/^#   //p' Makefile

# A wrong file name should not cost the user a build.
ifneq ($(INPUT),)
ifneq ($(shell test -f $(call quoted,$(INPUT)) && test -r $(call quoted,$(INPUT)) && echo readable),readable)
$(error INPUT=$(INPUT) is not a file that can be read)
endif
endif

demo: build/$(PRESET)/bin/deep_ep
	@build/$(PRESET)/bin/deep_ep demo --input $(call quoted,$(or $(INPUT),README.md))

test:
	@scripts/test $(if $(T),--names $(call quoted,$(T)),--quick python host)

check:
	@scripts/test --quick asan tsan cuda gates rxe

test-all:
	@scripts/test python host asan tsan cuda gates rxe

bench: build/$(PRESET)/bin/deep_ep
	@build/$(PRESET)/bin/deep_ep bench intranode

# Ninja knows what is up to date; make does not need to.
.PHONY: build/$(PRESET)/bin/deep_ep
build/$(PRESET)/bin/deep_ep:
	@scripts/setup
	@scripts/build $(PRESET) deep_ep_tool

wheel:
	@scripts/setup --install-only --wheel
	@scripts/wheels --sdist

docs:
	@scripts/setup --docs
	@scripts/docs

format:
	@scripts/setup --format
	@scripts/format

lint:
	@scripts/setup --lint
	@scripts/format --check
	@scripts/tidy --changed

clean:
	@rm -rf build
