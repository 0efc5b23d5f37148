PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help train format check test bench test-oldest figures lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

train: $(VENV)/installed ## Train the default model on real text; ARGS="key=value ..." changes it
	$(RUN) train.py $(ARGS)

format: $(VENV)/installed ## Format the code and mend what the linter can mend
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

check: $(VENV)/installed ## Formatting, lint, types, import rules
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: check ## All that CI runs: the checks, then every test that is not slow
	$(RUN) -m pytest -m "not slow"

bench: $(VENV)/installed ## The slow tests
	$(RUN) -m pytest -m slow

test-oldest: $(OLDEST)/installed ## The tests on the oldest torch that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -m "not slow"

figures: $(VENV)/installed ## Measure every number in the README (about two hours)
	$(RUN) benchmarks/overhead.py
	$(RUN) benchmarks/start.py
	$(RUN) benchmarks/layouts.py
	$(RUN) benchmarks/pipeline.py
	$(RUN) benchmarks/memory.py
	$(RUN) benchmarks/noise_scale.py
	$(RUN) benchmarks/learning.py

lock: ## Pin the newest versions that pyproject.toml allows into requirements.lock
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet torch==2.13.0 ".[dev]"
	$(VENV)/bin/pip freeze --exclude ndgpt | sed 's/+cpu$$//' | grep -vE '^(nvidia|cuda|triton)' > requirements.lock

clean: ## Remove the environments (runs/ and the token cache stay)
	rm -rf $(VENV) $(OLDEST)

$(VENV)/installed: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("ndgpt needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

$(OLDEST)/installed: requirements.lock
	$(PYTHON) -m venv $(OLDEST)
	sed 's/^torch==.*/torch==2.11.0/' requirements.lock > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -r $(OLDEST)/requirements.txt
	touch $@
