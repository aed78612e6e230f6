# make demo    the main job on this machine: three SSH hosts, Airflow, a nightly training; nothing is left behind
# make test    every test
# make fuzz    10,000 examples of everything that comes from outside; make test has 1,000
# make faults  what may die, tried on three hosts made of namespaces; a table of what was seen (45 min; needs root)
# make faults-quick  the part of it that runs with every change (12 min)
# make compose-test  the compose stack: built, started, trained with, hurt, taken down (needs a Docker engine)
# make check   style, types, the dependency rule, generated pages
#
# Each sets itself up first: Python 3.11 to 3.13 with venv, make and git are all that a machine needs.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
PY := $(BIN)/python
LOCK := requirements.lock.txt
STARTED := $(shell date +%s)

# Without bytecode Airflow takes twice as long to start.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-integration test-live test-acceptance faults faults-quick compose-test fuzz check format lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(VENV)/installed

# uv comes out of the same lock; where it cannot install the rest (an index that only pip knows), pip does.
$(VENV)/locked: $(LOCK)
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 with venv was found." \
		"Install one (on Debian: apt-get install python3 python3-venv), or say which: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): some minutes, once"
	@$(PYTHON) -m venv --clear $(VENV)
	@sed -n '/^uv==/,/# via/p' $(LOCK) > $(VENV)/uv.txt
	@$(PY) -m pip install --quiet --require-hashes --no-deps -r $(VENV)/uv.txt
	@$(BIN)/uv pip install --quiet --python $(PY) --require-hashes --no-deps --compile-bytecode -r $(LOCK) \
		|| $(PY) -m pip install --quiet --require-hashes --no-deps -r $(LOCK)
	@touch $@

$(VENV)/installed: $(VENV)/locked pyproject.toml
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	@$(PY) -m airflow_tfps.demo --started $(STARTED) $(DEMO)

test: setup
	$(PY) -m pytest

test-unit: setup
	$(PY) -m pytest tests/unit

test-integration: setup
	$(PY) -m pytest tests/integration

test-live: setup
	$(PY) -m pytest -m live

test-acceptance: setup
	$(PY) -m pytest tests/acceptance

fuzz: setup
	$(PY) -m pytest tests/unit/test_fuzz_*.py --hypothesis-profile fuzz --durations 0

faults: setup
	$(PY) -m pytest -m faults tests/acceptance/faults

faults-quick: setup
	$(PY) -m pytest -m "faults and quick" tests/acceptance/faults

# What was measured goes where docs/deployment.md shows it.
compose-test: setup
	TFPS_COMPOSE_REPORT=docs/compose-test.txt $(PY) -m pytest -m compose tests/acceptance/compose

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(PY) docs/make_keys.py --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(PY) docs/make_keys.py

# Newest versions that fit, for every platform, with hashes; no registry is named.
lock: setup
	$(BIN)/uv pip compile pyproject.toml --extra compose --extra demo --extra test --universal --python-version 3.11 \
		--generate-hashes --no-emit-package airflow-tfps --no-emit-index-url --upgrade --quiet \
		--custom-compile-command "make lock" --output-file $(LOCK)

clean:
	rm -rf $(VENV) .demo .live dist build result.json .mypy_cache .ruff_cache .pytest_cache .hypothesis
