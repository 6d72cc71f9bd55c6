# Everything runs in a private environment, .venv, that is made and filled on first use and left alone afterwards.

PYTHON ?= python3
# More arguments for pytest, e.g. make test ARGS="-k lease -x", or for a benchmark, e.g. make bench ARGS=--quick
ARGS ?=
# Of the broker that Celery's suite runs on: make celery-suite URL=taskgate+postgresql://user@host/database
URL ?= taskgate+sqlite://
# Of the benchmarks that look at one database: make bench-micro DATABASE=sqlite:////tmp/bench.db
DATABASE ?= postgresql://postgres@127.0.0.1:5432/test

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test celery-suite lint types imports check bench bench-micro bench-depth bench-leases bench-readers clean

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.package ## Publish a hundred tasks, kill the worker in the middle, count what is lost
	@$(BIN)/python examples/demo/run.py

test: $(VENV)/.test ## Run every test that this machine can run; what is skipped is named with its reason
	$(BIN)/python -m pytest -rs $(ARGS)

celery-suite: $(VENV)/.test ## Run Celery's own integration suite on URL=taskgate+..., or a selection: ARGS="-k chord"
	$(BIN)/python -m tests.conformance.celery_suite '$(URL)' $(ARGS)

check: lint types imports ## Everything that reads the code without running it

lint: $(VENV)/.test ## Check style and layout of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test ## Check types
	$(BIN)/mypy

imports: $(VENV)/.test ## Check who imports whom
	$(BIN)/lint-imports

bench: $(VENV)/.bench ## Measure Celery's brokers side by side, into benchmark-results: ARGS="--quick", ARGS="--only redis"
	$(BIN)/python benchmarks/compare.py $(ARGS)

bench-micro: $(VENV)/.bench ## Count the statements and microseconds of one task, and say where they go, on DATABASE=...
	$(BIN)/python benchmarks/micro.py '$(DATABASE)' $(ARGS)

bench-depth: $(VENV)/.bench ## Claim beside a million tasks, ready or waiting for an ETA: ARGS="--rows 100000"
	$(BIN)/python benchmarks/depth.py '$(DATABASE)' $(ARGS)

bench-leases: $(VENV)/.bench ## Renew ten thousand leases, and compare with a hundred
	$(BIN)/python benchmarks/leases.py '$(DATABASE)' $(ARGS)

bench-readers: $(VENV)/.bench ## Work beside four REPEATABLE READ readers of the table of tasks, and without (PostgreSQL)
	$(BIN)/python benchmarks/readers.py '$(DATABASE)' $(ARGS)

clean: ## Remove the environment, caches and build results
	rm -rf $(VENV) dist benchmark-results .celery-suite .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Each stamp is touched last, so that an interrupted step is done again.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("taskgate needs Python 3.10 or newer and %s is %s.%s; name another one: make PYTHON=python3.12" % (sys.executable, *sys.version_info[:2]) if sys.version_info < (3, 10) else 0)'
	@echo "Making a private environment in $(VENV) (only once)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.package: pyproject.toml | $(VENV)/.created
	@echo "Installing the package"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.created
	@echo "Installing the package and what its tests need"
	@$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.package

$(VENV)/.bench: pyproject.toml | $(VENV)/.created
	@echo "Installing the package and what its benchmarks need"
	@$(PIP) --editable '.[bench]'
	@touch $@ $(VENV)/.package
