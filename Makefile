# Everything a stranger needs: `make train`, `make test`. The environment is made once, in .venv, from pinned versions.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Shared cores: OpenMP threads that spin while idle slow each other down several times.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install train test lint docs clean

install: .venv/installed

train: .venv/installed
	$(BIN)/falconet train

test: .venv/installed-for-tests lint
	$(BIN)/python -m pytest

lint: .venv/installed-for-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-for-tests
	$(BIN)/python -m falconet.config.document > docs/options.md

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/installed-for-tests: .venv/installed
	$(INSTALL) -e '.[test,lint]'
	touch $@
