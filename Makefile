# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes its own .venv from constraints.txt; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet install --constraint constraints.txt
SPEC := pyproject.toml constraints.txt

# Beside other programs, threads that spin for long while they wait stall a run; the command line sets the same.
ifeq ($(OMP_WAIT_POLICY)$(GOMP_SPINCOUNT)$(KMP_BLOCKTIME),)
export GOMP_SPINCOUNT := 2000
endif

.PHONY: help setup demo test lint bench docs clean
help: ## say what each target does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "foretrain needs Python 3.11 or later; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.core: .venv/.made $(SPEC)
	@echo "Installing foretrain and its pinned dependencies into .venv (once) ..."
	$(PIP) torch && $(PIP) --editable .
	@touch $@

.venv/.test: .venv/.core
	@echo "Installing the pinned test tools into .venv (once) ..."
	$(PIP) --editable '.[parquet,tensorboard,wandb,mlflow,trackio,sweep]' $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml","rb"))["dependency-groups"]["test"])')
	@touch $@

setup: .venv/.core ## install foretrain into .venv
	@$(BIN)/foretrain --version

demo: .venv/.core ## train a small GPT on Python's own source code (one to two minutes on two cores)
	$(BIN)/foretrain train --out runs/demo --overwrite --set max_steps=400 --set evaluation.batches=20 --set audit.time_budget=0.03 # so few steps would try no move otherwise

lint: .venv/.test ## style, types and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## lint, then every test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadgroup # compiled modules are kept: some 200 processes start

bench: .venv/.core ## the CPU benchmarks behind the published figures
	$(BIN)/foretrain bench run
	$(BIN)/python benchmarks/throughput.py --device cpu
	$(BIN)/python benchmarks/shakespeare.py
	$(BIN)/python benchmarks/low_noise.py

docs: .venv/.core ## write docs/configuration.md anew from the schema
	$(BIN)/python docs/generate_configuration.py

clean: ## remove .venv and caches, never a run
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
