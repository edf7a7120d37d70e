# `make demo` and `make test` work from a fresh clone: they make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quick lint types tests clean

# Train the embedded example on two processes for about a minute, evaluate it, and say where the run lies.
demo: $(READY)
	$(BIN)/unisono train language

# Everything that has to hold: lint, types, tests.
test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The tests without the long matrices.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Unisono needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
