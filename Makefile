# `make demo` and `make test` work from a fresh clone: they make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Of the modules with slow tests a run takes one part of seven, another with another commit; SHARD=all takes them all.
COMMIT := $(shell git rev-parse --short=4 HEAD 2>/dev/null || echo 0)
SHARD ?= $(shell echo $$((0x$(COMMIT) % 7 + 1)))/7

.PHONY: demo test quick lint types tests native wheel fuzz clean

# Train the embedded example on two processes for about a minute, evaluate it, and say where the run lies.
demo: $(READY)
	$(BIN)/unisono train language

# Everything that has to hold: lint, types, tests; of the long matrices one part, or all with SHARD=all.
test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --shard=$(SHARD)

# The tests without the long matrices.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# The native core of unisono.audio again, after a change of its sources; an error where it cannot be built.
native: $(READY)
	UNISONO_NATIVE=require $(BIN)/python setup.py --quiet build_ext --inplace

# A manylinux wheel, installed into an empty environment, where it has to decode a recording.
wheel: $(READY)
	$(BIN)/python -m tests.audio.wheel

# 20,000 mutated recordings of each format through the native core, under AddressSanitizer and UBSan.
fuzz: $(READY)
	$(BIN)/python -m tests.audio.fuzz --count 20000

$(READY): pyproject.toml constraints.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Unisono needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
