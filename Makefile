# Needs Python 3.11, 3.12 or 3.13 and make, nothing else: every target sets up .venv by itself, from hash-locked files.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --retries 10
# The scenario of `make load`.
NAME ?= race
# How long `make fuzz` guides itself by coverage, and the environment it does that in.
FUZZ_SECONDS ?= 720
FUZZ := .run/fuzz-venv
# More pytest arguments, as in `make test ARGS='-k ledger -x'`.
ARGS ?=

# The first interpreter that kvgate supports and that can make a virtual environment.
PICK := for p in $${PYTHON:-} python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo "$$p"; exit 0; } || true; done; \
	echo "kvgate needs Python 3.11, 3.12 or 3.13 with its venv module (Debian: apt-get install python3-venv); \
	set PYTHON=/path/to/python to name one" >&2; exit 1

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## */\1\t/' | expand -t 16

demo: $(VENV)/.demo ## Real Envoy, Valkey, agent and llama.cpp on this machine, without kvgate and with it
	$(BIN)/kvgate demo $(ARGS)

test: $(VENV)/.dev ## The whole suite
	$(BIN)/python -m pytest $(ARGS)

test-unit: $(VENV)/.dev ## Unit and property tests: no process, no socket
	$(BIN)/python -m pytest tests/unit tests/property $(ARGS)

test-e2e: $(VENV)/.dev ## Real Envoy, real Valkey, engines
	$(BIN)/python -m pytest tests/e2e $(ARGS)

test-install: $(VENV)/.dev ## Fresh installs with pip and uv in clean virtual environments
	$(BIN)/python -m pytest tests/install -m install $(ARGS)

test-engines: $(VENV)/.dev ## Against real engines that are no dependency of the suite
	$(BIN)/python -m pytest -m engines $(ARGS)

model: $(VENV)/.dev ## 10,000 runs of the ledger's model checker on the real scripts (ARGS="--seed 7")
	$(BIN)/python -m tests.model.check --runs 10000 --on scripts $(ARGS)

chaos: $(VENV)/.dev ## Minutes of killed, stopped and cut-off parts under load; the ledger on one server, a cluster, behind Sentinels
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: $(VENV)/.dev $(FUZZ)/.ready ## Hypothesis machines with more examples, then 12 minutes of coverage-guided fuzzing (FUZZ_SECONDS)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m fuzz --timeout=1800 $(ARGS)
	$(FUZZ)/bin/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

bench: $(VENV)/.dev ## Added latency and CPU per request, ledger operations per second; writes docs/benchmarks.md
	$(BIN)/python -m tests.bench $(ARGS)

soak: $(VENV)/.dev ## Six minutes of a recorded trace at three times its speed, three times: ledger at zero, memory flat
	$(BIN)/python -m tests.load soak $(ARGS)

load: $(VENV)/.dev ## One load scenario and its figures, as in `make load NAME=race ARGS=--publish` (docs/evidence.md)
	$(BIN)/python -m tests.load $(NAME) $(ARGS)

check: $(VENV)/.dev ## Format, lint, types, import contracts, spelling
	@status=0; for tool in "ruff format --check --output-format=concise" "ruff check --output-format=concise" \
	  mypy lint-imports codespell; do echo "-- $$tool"; $(BIN)/$$tool || status=1; done; exit $$status

format: $(VENV)/.dev ## Format and fix what can be fixed mechanically
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

ground-truth: $(VENV)/.dev ## Memory formulas against figures that engines logged, one line each (KVGATE_GROUND_TRUTH=FILE for others)
	$(BIN)/python -m tests.ground_truth $(ARGS)

proto: $(VENV)/.dev ## Regenerate extproc/wire/*_pb2.py from the .proto beside it
	$(BIN)/python -m extproc.wire.generate

envoy: $(VENV)/.dev ## Regenerate envoy/*.yaml from deploy/examples, and the compose stack's Envoy configuration
	$(BIN)/python -m tests.configs.regenerate

lock: $(VENV)/.dev ## Resolve requirements/*.txt anew (UPGRADE=1 takes newer versions)
	$(call compile,dev,--extra local --extra demo --group dev $(if $(UPGRADE),--upgrade))
	$(call compile,demo,--extra local --extra demo --group build --constraint requirements/dev.txt)
	$(call compile,local,--extra local --group build --constraint requirements/dev.txt)
	$(call compile,base,--group build --constraint requirements/dev.txt)
	$(call compile,fuzz,--group fuzz --constraint requirements/dev.txt)

clean: ## Remove the virtual environment and everything generated outside git
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .run .demo

# One lock for Python 3.11-3.13, with hashes and without the address of any index.
define compile
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate --output-file requirements/$(1).txt $(2)

endef

$(BIN)/python:
	@python=$$($(PICK)); echo "Setting up $(VENV) with $$("$$python" --version)"; "$$python" -m venv --clear $(VENV)

# The package itself is linked, not copied; its build backend comes from the lock, so nothing is fetched here.
define link_package
	$(PIP) --no-deps --no-build-isolation --no-index --editable .
endef

$(VENV)/.demo: requirements/demo.txt pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes --requirement requirements/demo.txt
	$(link_package)
	@touch $@

$(VENV)/.dev: requirements/dev.txt pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes --requirement requirements/dev.txt
	$(link_package)
	@touch $@ $(VENV)/.demo

$(FUZZ)/.ready: requirements/fuzz.txt
	@python=$$($(PICK)); "$$python" -m venv --clear $(FUZZ); \
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --retries 10 --only-binary atheris \
	  --require-hashes --requirement requirements/fuzz.txt \
	|| { echo "make fuzz: no atheris for $$("$$python" --version) on $$(uname -sm): its wheels are for Python 3.11 to 3.13 \
	on Linux x86_64; the Hypothesis machines alone: make test-unit ARGS='-m fuzz'" >&2; exit 1; }
	@touch $@

.PHONY: help demo test test-unit test-e2e test-install test-engines model chaos fuzz bench soak load check format ground-truth proto envoy lock clean
