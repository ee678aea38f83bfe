# The two commands of a newcomer are `make train` and `make test`; whatever they need is made on the way.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: install train test lint bench clean

install: $(VENV)/.dev

# The stamp is older than what it was made from, or went with .venv: install anew.
$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

train: install
	$(BIN)/python train.py $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.bench
	$(BIN)/python scripts/bench_collect.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
