# `make demo` finds a circuit, `make test` checks everything. Each makes .venv first.
# Use another interpreter or place: make demo PYTHON=python3.12 VENV=~/envs/circuitlab

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
TESTS ?= tests
WORKERS ?= 2

# One thread a worker: two workers on two cores, and sums in a fixed order.
check: export OMP_NUM_THREADS := 1
check: export MKL_NUM_THREADS := 1
quick: export OMP_NUM_THREADS := 1
quick: export MKL_NUM_THREADS := 1

.PHONY: demo test quick lint types check format docs clean

demo: $(VENV)/.core
	@$(BIN)/circuitlab demo

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory check

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(WORKERS) $(TESTS) \
	  -m "not slow and not real_model and not browser and not ray and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

check: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(WORKERS) $(TESTS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.core
	$(BIN)/python scripts/document_cli.py

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis

# torch comes first and from the constraint: nothing after it pulls another one.
$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("circuitlab needs Python 3.11 or newer: make PYTHON=python3.11 …" if sys.version_info < (3, 11) else 0)'
	@echo "Installing circuitlab into $(VENV) (once; a minute or two) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -c constraints.txt torch
	@$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the test tools into $(VENV) …"
	@$(PIP) install -qq -c constraints.txt -e ".[dev]"
	@touch $@
