# `make demo` and `make test` work from a fresh clone: they make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
# Tests run in as many processes as there are cores, at most eight. The quick ones have one more: they wait a fourth of
# their time.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))
# Seconds of workers for the slow tests, as tests/seconds.json counts them; three quarters of that on quiet cores. They
# need half as much again, so the date says which have to wait.
EACH ?= 3000
BUDGET ?= $(shell echo $$(($(EACH) * $(WORKERS))))
# `make test PACKAGE=language` (or audio, faults, unisono, …) runs the tests of one package alone.
PLACES := recipes/$(PACKAGE)/tests packages/unisono-$(PACKAGE)/tests packages/$(PACKAGE)/tests
TESTS := $(if $(PACKAGE),$(or $(firstword $(wildcard $(PLACES))),$(error there is no package $(PACKAGE))))
# A process in which a test hangs without noticing its deadline (conftest.py) shows what each thread was at, and ends.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder -o faulthandler_exit_on_timeout=true
unexport PYTHONDONTWRITEBYTECODE  # what one process of a run has compiled, the others find

.PHONY: demo test test-all test-gpu gpu-wheels quick slow alone again lint types measure native wheels wheel fuzz fuzz-readers docs clean

# Install the core and one recipe, train its embedded example on two processes for about a minute, and evaluate it.
demo: $(DEMO)
	$(BIN)/unisono train language layout.world_size=2

# What a developer runs all day: ten minutes on two cores. Types are checked beside the tests, which leave room for it;
# what mypy says stands above the tests' dots.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types quick

# Everything that has to hold: an hour on two cores.
test-all: test slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

quick: $(READY)
	$(PYTEST) -n $$(($(WORKERS) + 1)) -o faulthandler_timeout=480 -m "not slow" $(TESTS)

# The long matrices alone; what today's budget has no room for is listed at the end, with its date.
slow: $(READY)
	$(PYTEST) -n $(WORKERS) -o faulthandler_timeout=1500 -m slow --budget=$(BUDGET)

# `make alone PACKAGE=language`: its quick tests, in an environment of what its pyproject declares and nothing else.
alone: $(READY)
	$(if $(PACKAGE),,$(error name the package: make alone PACKAGE=language))
	$(BIN)/python -m tests.workspace.alone $(patsubst %/tests,%,$(TESTS))

# What failed in the last run, by itself. What passes now raced with the tests beside it: a fault of the test, to be fixed.
again: $(READY)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -v

# All tests, and what each module costs written down for the budget. To be run on a quiet machine.
measure: $(READY)
	$(PYTEST) -n $(WORKERS) --measure=tests/seconds.json

# What runs on a GPU, from a checkout without installation, in at most six minutes on one; on the CPU where there is none.
test-gpu:
	$(PYTHON) -m pytest --confcutdir=tests/gpu -m gpu tests/gpu --durations=10

# Libraries that a bare CUDA image lacks, as wheels for its Python in build/gpu-wheels; to be made where there is a network.
gpu-wheels: $(BIN)/python
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest build/gpu-wheels -c constraints.txt \
	  pyarrow fsspec rich filelock lion-pytorch ml_dtypes pyyaml psutil xxhash array-api-compat pygments \
	  markdown-it-py mdurl optax equinox jaxtyping wadler_lindig absl-py miniaudio soundfile cffi pycparser scipy

# The native core of unisono.audio again, after a change of its sources; an error where it cannot be built.
native: $(READY)
	cd packages/unisono-audio && UNISONO_NATIVE=require $(abspath $(BIN))/python setup.py --quiet build_ext --inplace

# An sdist and, made from it, a wheel of each package, in dist/.
wheels: $(READY)
	for project in packages/*/ recipes/*/; do $(BIN)/python -m build --outdir dist $$project || exit 1; done

# A manylinux wheel of unisono-audio, installed into an empty environment, where it has to decode a recording.
wheel: $(READY)
	$(BIN)/python -m packages.unisono-audio.tests.wheel

# 20,000 mutated recordings of each format through the native core, under AddressSanitizer and UBSan.
fuzz: $(READY)
	$(BIN)/python -m packages.unisono-audio.tests.fuzz --count 20000

# 20,000 mutations of every kind of file and message that somebody else may write, through what reads them.
fuzz-readers: $(READY)
	$(BIN)/python -m tests.security.fuzz --count 20000

# The documentation site, into build/docs/html; nothing is loaded from a network, now or when it is read.
docs: $(READY)
	$(BIN)/python docs/site/build.py

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PROJECTS := $(wildcard packages/*/pyproject.toml recipes/*/pyproject.toml)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Unisono needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The core and one recipe; nothing else.
$(DEMO): $(BIN)/python packages/unisono/pyproject.toml recipes/language/pyproject.toml constraints.txt
	$(PIP) -e packages/unisono -e recipes/language
	touch $(DEMO)

$(READY): $(BIN)/python $(PROJECTS) workspace.txt constraints.txt packages/unisono-audio/setup.py
	$(PIP) -r workspace.txt
	touch $(READY) $(DEMO)

clean:
	rm -rf $(VENV) .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
