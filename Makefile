# make quickstart   set up .venv with the pinned dependencies and run the main job end to end
# make test         everything CI runs: lint, types, layers, tests
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv quickstart test test-jobs test-rest test-fast lint format

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -c constraints.txt -e '.[dev,s3server]'
	touch $@ $(VENV)/.core

venv: $(VENV)/.dev

quickstart: $(VENV)/.core
	$(BIN)/elastic-train quickstart $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict elastic_train
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two streams side by side, of about the same length: what needs a Ray cluster or an outage, and so waits, and the rest.
test: lint
	$(MAKE) --jobs=2 --keep-going test-jobs test-rest

test-jobs: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'cluster or waits' $(ARGS)

test-rest: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not cluster and not waits' $(ARGS)

test-fast: lint
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)
