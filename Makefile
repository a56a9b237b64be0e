# Two commands from a fresh clone: `make train`, then `make demo`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
JOB ?= examples/digits.yaml
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, not {v.major}.{v.minor}: make PYTHON=/path/to/python3.11 ...")'
	@echo "Installing into $(VENV) (once; PyTorch is large, so this takes some minutes; log: $(VENV).log)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' > $(VENV).log 2>&1 \
		|| { tail -n 20 $(VENV).log; exit 1; }
	@touch $@

.PHONY: train
train: $(STAMP) ## Train JOB (default: handwritten digits on two local nodes); ARGS='--set nodes.target=3'
	@$(BIN)/elastic-train train $(JOB) $(ARGS)

.PHONY: demo
demo: $(STAMP) ## Kill a node in mid-epoch, watch training go on, and prove that nothing was lost
	@$(BIN)/elastic-train demo $(ARGS)

.PHONY: test
test: $(STAMP) ## Run the quick tests
	@$(BIN)/python -m pytest -q -m 'not slow and not docker and not aws' $(ARGS)

.PHONY: check
check: $(STAMP) ## Check lint, format, types and import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy && $(BIN)/lint-imports

.PHONY: up
up: $(STAMP) ## Start the local Prefect server (`train` does so by itself)
	@$(BIN)/elastic-train server up $(ARGS)

.PHONY: down
down: $(STAMP) ## Stop the local Prefect server
	@$(BIN)/elastic-train server down

.PHONY: clean
clean: ## Stop the server; remove environment, caches and server data (runs stay)
	@test ! -x $(BIN)/elastic-train || $(BIN)/elastic-train server down
	@rm -rf $(VENV) $(VENV).log .elastic .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
