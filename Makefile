# make train   sets up .venv and trains the default model       make check   ruff, mypy, lockstep lint
# make test    sets up .venv and runs the tests                 make help    the rest
PYTHON ?= python3
BIN := .venv/bin
# The CUDA build of torch where an NVIDIA GPU is visible, else the pinned build that CI tests.
TORCH := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help train check chaos matrix mutants docs test test-lint test-full test-oldest test-gpu gpu release clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# What training needs, and nothing else.
.venv/train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lockstep needs Python >= 3.11; choose one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) '$(TORCH)'
	$(INSTALL) -e .
	@touch $@

# What the checks and the tests need besides: the linter too.
.venv/dev: .venv/train packages/lint/pyproject.toml
	$(INSTALL) -e packages/lint -e '.[dev]'
	@touch $@

.venv/docs: .venv/dev
	$(INSTALL) -e '.[docs]'
	@touch $@

# The minor version of Lightning before that of constraints.txt, beside it, for the test that needs it.
.venv/lightning-2.5.6: | .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
		lightning==2.5.6 pytorch-lightning==2.5.6

train: .venv/train ## train the default model on this machine's Python library (about two minutes)
	$(BIN)/lockstep train --experiment-name first-light --max-steps 700

check: .venv/dev ## ruff (lint and format), mypy (strict), lockstep lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lockstep lint --select ALL --ignore LS008,LS020 src packages/lint/src examples

docs: .venv/docs ## the site, into build/site/html; a warning, a dead link or a page over 500 KB fails (half a minute)
	$(BIN)/python docs/site/build_site.py

test: .venv/dev .venv/lightning-2.5.6 ## every test that needs no GPU, except the slow ones, two files at a time
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

test-lint: .venv/dev ## the linter's tests alone
	$(BIN)/python -m pytest packages/lint/tests -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

test-full: .venv/dev .venv/lightning-2.5.6 ## the slow tests too
	$(BIN)/python -m pytest -m "not gpu"

# The oldest torch of pyproject.toml, whose own limit on setuptools is below the pinned one.
.venv-oldest/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v '^setuptools==' constraints.txt >.venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt \
		'torch==2.11.0' -e '.[deepspeed,images,peft]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# What depends on the version of torch: engines, exact bits, graphs, saves, waits, forks, what a GPU's tests do on a CPU.
OLDEST := tests/engines tests/transforms tests/parallel/test_tensor_runs.py tests/parallel/test_tensor_fsdp.py tests/launch/test_preloaded.py $(wildcard tests/launch/test_fork*.py) \
	tests/guards/test_saver.py tests/checkpoint/test_checkpoint_round_trip.py tests/checkpoint/test_checkpoint_layouts.py \
	tests/training/test_host_waits.py tests/training/test_device_updates.py tests/test_gpu_runs.py

test-oldest: .venv-oldest/dev ## the tests that depend on torch's version, on the oldest one that is promised (2.11)
	.venv-oldest/bin/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(OLDEST)

matrix: .venv/dev ## every pair of parts, and a sample of all combinations (MATRIX_SEED, MATRIX_COUNT, MATRIX_CASES)
	$(BIN)/python -m pytest tests/matrix

chaos: .venv/dev ## every planted fault against real runs, then the table in docs/inside/reliability.md (long)
	$(BIN)/python -m pytest tests/chaos tests/guards
	$(BIN)/python bench/chaos.py --write

mutants: .venv/dev ## plausible mistakes put into a copy of the core: do the tests notice? (long; ARGS="--only loop --count 4")
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(ARGS)

test-gpu: ## the GPU tests, with the Python that is on PATH (nothing is installed)
	$(PYTHON) bench/device/run.py --only tests $(ARGS)

gpu: ## all that only a GPU shows, into outputs/gpu: ARGS="--call 1" (510 s at most), then "--call 2" (240 s); --toy rehearses
	$(PYTHON) bench/device/run.py $(ARGS)

release: ## builds both distributions, checks and tries them, prints the upload command and uploads nothing (ARGS=--rehearse)
	PYTHON=$(PYTHON) bash scripts/release.sh $(ARGS)

clean: ## removes the virtual environments and every cache
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info packages/lint/build packages/lint/src/*.egg-info
