# Start with `make train` and `make test`. The environment is created once, in .venv, from pinned versions.
PYTHON ?= python3
BIN := .venv/bin
# Without --no-compile, pip compiles thousands of modules that are never imported; Python compiles the others as it goes.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# If bytecode is turned off, every process compiles all of torch again.
export PYTHONDONTWRITEBYTECODE :=
# Shared cores: OpenMP threads that spin while idle slow each other down several times.
export OMP_WAIT_POLICY ?= PASSIVE
# Processes that share the tests; each holds torch, about 1 GB.
WORKERS ?= 2
# NVIDIA's Triton server, which the tests start, is packaged for Linux on x86-64 only.
ifeq ($(shell uname -s -m),Linux x86_64)
TRITON := .venv-triton/installed
endif
# What `make install` says at its end: extras of pyproject.toml, and what each is for.
OPTIONAL := tensorboard 'train --tensorboard: event files for TensorBoard' wandb 'train --wandb: Weights & Biases' \
	mlflow 'train --mlflow: MLflow' aim 'train --aim: Aim, without -c constraints.txt: it needs an older filelock' \
	plots 'train --save-plots: PNG and PDF plots' nvml 'on NVIDIA GPUs: the energy of a run, and the load in falconet watch' search 'falconet search: Optuna' \
	export 'falconet export: ONNX' telemetry 'serve --opentelemetry: traces'
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: install triton chromium train check fast test tests test-slow test-oldest lint docs clean all get-data get-turbojpeg build-turbojpeg install-turbojpeg

install: .venv/installed
	@echo "installed: .venv/bin/falconet. Optional parts, each by $(BIN)/pip install -c constraints.txt '.[NAME]':"
	@printf '  %-12s %s\n' $(OPTIONAL)

# For `falconet bench serve --server triton`.
triton: $(TRITON)

train: .venv/installed
	$(BIN)/falconet train

# Lint and the fast tests side by side, in about a minute: what to run after every change. ARGS goes to pytest:
# `make check ARGS=--lf` repeats what failed.
check: .venv/installed-for-tests
	@$(MAKE) --no-print-directory -j2 lint fast

fast: .venv/installed-for-tests
	$(PYTEST) -m 'not run and not dist and not gpu and not slow' $(ARGS)

# Everything but the minutes: what CI runs.
test: .venv/installed-for-tests $(TRITON)
	@$(MAKE) --no-print-directory -j2 lint tests

tests: .venv/installed-for-tests $(TRITON) chromium
	$(PYTEST) $(ARGS)

# The browser for the tests of pages; without it they are skipped, or fail if CI is set.
CHROMIUM := apt-get install -y --no-install-recommends chromium
chromium:
	@if { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(CHROMIUM) > /dev/null || echo "could not install Chromium"; \
	else echo "no Chromium for the tests of pages; on Debian: sudo $(CHROMIUM)"; fi

# The minutes: fuzzing, ssh, several hosts, kills, training to an accuracy.
test-slow: .venv/installed-for-tests $(TRITON)
	$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

# All tests with the oldest versions that are supported; the Triton of torch 2.11 refuses kernels that newer ones accept.
test-oldest: .venv-oldest/installed $(TRITON) chromium
	$(subst $(BIN),.venv-oldest/bin,$(PYTEST)) $(ARGS)

.venv-oldest/installed: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	awk -F== 'NR == FNR { oldest[$$1]; print } NR != FNR && !($$1 in oldest)' constraints-oldest.txt constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c .venv-oldest/constraints.txt -e '.[test]'
	touch $@

lint: .venv/installed-for-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-for-tests
	$(BIN)/python -m falconet.config.docs options > docs/knowing/options.md
	$(BIN)/python -m falconet.config.docs configs > docs/knowing/configs.md
	$(BIN)/python -m falconet.legacy.migration > docs/originals/migration.md

# The originals' targets. TurboJPEG's place is taken by our own decoder, whose source is here: nothing is fetched.
all: install get-data install-turbojpeg

get-data:
	@sh compat/pytorch/data/get_data.sh

get-turbojpeg:
	@echo "nothing to fetch: the decoder's source is in falconet/data/native/src"

build-turbojpeg: .venv/installed
	$(BIN)/python -m falconet.data.native.compiler

install-turbojpeg: get-turbojpeg build-turbojpeg

clean:
	rm -rf .venv .venv-triton .venv-oldest build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[serve]'
	touch $@

.venv/installed-for-tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[test,lint]'
	touch .venv/installed $@

.venv-triton/installed: requirements-triton.txt
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	touch $@
