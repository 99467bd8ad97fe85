# Every target makes its own virtual environment the first time. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt $(PIP_ARGS)

.PHONY: demo test aiter lint format schemas bench coverage clean help

help:            ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(VENV)/.base    ## make a tiny Quark checkpoint and run every command on it
	$(BIN)/mxfp4prep demo

test: $(VENV)/.dev     ## run the whole test suite
	MXFP4PREP_AITER_SITE=$(wildcard $(CURDIR)/.aiter-site) $(BIN)/python -m pytest -n auto $(ARGS)

aiter: $(VENV)/.dev    ## fetch ROCm's aiter (40 MB) beside, not into, the environment: more tests run then
	$(PIP) --no-deps --upgrade --target .aiter-site amd-aiter==0.1.7.post2.dev18

lint: $(VENV)/.dev     ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev   ## let ruff format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: $(VENV)/.dev  ## write the shipped JSON schemas anew from the models
	$(BIN)/python -m mxfp4prep.schemas

bench: $(VENV)/.dev    ## speed and memory, about 10 minutes and 15 GB of disk; JSON to stdout
	$(BIN)/python bench/run.py

coverage: $(VENV)/.dev ## branch coverage of the package
	$(BIN)/coverage run --parallel-mode -m pytest -n 0
	$(BIN)/coverage combine
	$(BIN)/coverage report -m

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mxfp4prep needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	touch $@

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .aiter-site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
