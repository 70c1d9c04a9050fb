# A thin front: everything is CMake presets and scripts/.
#
#   make demo [INPUT=file]   a Mixture-of-Experts layer on 8 ranks (GPUs, else CPU), checked against the reference
#   make test [PRESETS=...]  the quick tests, also under AddressSanitizer, UBSan and ThreadSanitizer
#   make test-all [PRESETS=...]  lint, and every test: all of ThreadSanitizer, RoCE in emulated machines, the wheel, 1,000 faults
#   make smoke               a part of the tests of every program, under a minute after a build
#   make bench               how fast dispatch and combine are here
#   make wheel               build/wheels: the Python package, to be installed on other machines, and its sources
#   make docs                build/docs/html: these pages and the reference of C++ and Python
#   make format | lint       clang-format over the sources | check that, and clang-tidy over the library
#   make clean

# Where there are GPUs and a compiler for them, they are used.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && scripts/cuda_environment >/dev/null 2>&1 && echo yes)
PRESET := $(if $(GPU),cuda,host)
PRESETS ?= host python asan tsan $(if $(GPU)$(filter test-all,$(MAKECMDGOALS)),cuda)
quoted = '$(subst ','\'',$(1))'

.DEFAULT_GOAL := help
.PHONY: help demo test test-all smoke bench wheel docs format lint clean

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
	@DEEP_EP_UNITY_PROGRAMS=1 scripts/test --quick $(PRESETS)

test-all: lint
	@scripts/test $(PRESETS)

smoke:
	@scripts/setup
	@scripts/build host
	@ctest --preset host --label-regex smoke --parallel $$(nproc)

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
	@scripts/tidy

clean:
	@rm -rf build
