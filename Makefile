# Two commands from a fresh clone: `make train`, then `make demo`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
JOB ?= examples/digits.yaml
POOL ?=
IMAGE ?= elastic-train:latest
BASE ?=
HOST_BASE ?= python:3.11-slim-bookworm
STAGE ?=
ARGS ?=
# Most tests wait for processes; a file stays in one worker, so that its servers are started once.
PARALLEL ?= -n 2 --dist loadfile
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, not {v.major}.{v.minor}: make PYTHON=/path/to/python3.11 ...")'
	@echo "Installing into $(VENV) (once; PyTorch is large, so this takes some minutes; log: $(VENV).log)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' > $(VENV).log 2>&1 \
		|| { tail -n 20 $(VENV).log; exit 1; }
	@touch $@

.PHONY: train
train: $(STAMP) ## Train JOB (default: digits on two local nodes); POOL=docker|aws|aws-emulated; ARGS='--set nodes.target=3'
	@case '$(POOL)' in docker|aws-emulated) docker image inspect $(IMAGE) >/dev/null 2>&1 || $(MAKE) --no-print-directory image;; esac
ifeq ($(POOL),aws-emulated)
	@$(BIN)/python -m tasks.emulator --image $(IMAGE) --host-base $(HOST_BASE) $(if $(STAGE),--stage $(STAGE)) \
		$(BIN)/elastic-train train $(JOB) $(ARGS)
else
	@$(BIN)/elastic-train train $(JOB) $(if $(POOL),--set pool.kind=$(POOL)) \
		$(if $(filter docker,$(POOL)),--set pool.image=$(IMAGE)) $(ARGS)
endif

.PHONY: image
image: ## Build IMAGE, on BASE if given, for nodes as containers
	@docker build --tag $(IMAGE) $(if $(BASE),--build-arg BASE=$(BASE)) .

.PHONY: demo
demo: $(STAMP) ## Kill a node in mid-epoch, watch training go on, and prove that nothing was lost
	@$(BIN)/elastic-train demo $(ARGS)

.PHONY: test
test: $(STAMP) ## Run the quick tests
	@$(BIN)/python -m pytest -q $(PARALLEL) -m 'not slow and not docker and not aws and not ui' $(ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## Run the end-to-end tests and the planted bugs (a quarter of an hour)
	@$(BIN)/python -m pytest -q $(PARALLEL) -m 'slow and not docker and not aws and not ui' --timeout 300 $(ARGS)

.PHONY: test-image
test-image: $(STAMP) ## Build the image that the tests use, of this environment: no registry is needed
	@tests/docker/make_base.sh elastic-train-base:test $(VENV)/lib/python3*/site-packages
	@$(MAKE) --no-print-directory image IMAGE=elastic-train:test BASE=elastic-train-base:test

.PHONY: test-docker
test-docker: test-image ## Run the tests that need a Docker engine
	@$(BIN)/python -m pytest -q -m docker --timeout 300 $(ARGS)

.PHONY: test-ui
test-ui: $(STAMP) ## Look at a run in the Prefect UI, in headless Chromium (apt-get install chromium)
	@$(BIN)/python -m pytest -q -m ui $(ARGS)

.PHONY: test-aws
test-aws: $(STAMP) ## Run the tests of the AWS path, on the emulator
	@$(BIN)/python -m pytest -q -m 'aws and not docker' --timeout 300 $(ARGS)

.PHONY: test-terraform terraform-test
terraform-test: test-terraform
test-terraform: ## Check the base of infra/terraform without an account
	@terraform -chdir=infra/terraform fmt -check -recursive
	@terraform -chdir=infra/terraform init -backend=false -input=false -no-color > /dev/null
	@terraform -chdir=infra/terraform validate -no-color
	@terraform -chdir=infra/terraform test -no-color

.PHONY: check
check: $(STAMP) ## Check lint, format, types and import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy && $(BIN)/lint-imports

.PHONY: docs
docs: $(STAMP) ## Make a site of docs/ in build/site; every link is checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "build/site/index.html"

.PHONY: up
up: $(STAMP) ## Start Prefect: server, worker and all deployments (`train` needs none of it)
	@$(BIN)/elastic-train server up --deploy $(ARGS)

.PHONY: down
down: $(STAMP) ## Stop Prefect's worker and server
	@$(BIN)/elastic-train server down

.PHONY: clean
clean: ## Stop the server; remove environment, caches and server data (runs stay)
	@test ! -x $(BIN)/elastic-train || $(BIN)/elastic-train server down
	@rm -rf $(VENV) $(VENV).log .elastic .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
