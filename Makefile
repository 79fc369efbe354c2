# Two commands do everything on a machine that has Python 3.11+, pip and make:
#   make train    set up, then run the main job
#   make test     set up, then lint, types and tests
# Everything is installed into .venv in this checkout; the machine's Python is never touched.

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# pip of the machine, working on .venv: no ensurepip or python3-venv package is needed.
PIP := $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-input --root-user-action=ignore
# A lock names every package there is to install, so pip has nothing to work out. Left to look for itself, pip before
# 23.3 takes the newest release of a package that another one wants with an extra, and then refuses it for its hash.
INSTALL_LOCK := $(INSTALL) --no-deps --require-hashes -r

.PHONY: help train test test-learning results bench chaos soak simulate test-lowest test-newest test-versions lint types check format setup setup-dev lock docs wheel clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: setup ## set up, then train; options such as ARGS='--seed 1'
	@echo "The command is $(BIN)/dreamfleet; after '. $(BIN)/activate' it is just dreamfleet."
	@$(BIN)/dreamfleet train $(ARGS)

# Many tests wait for processes, so there are two workers for each of two cores.
test: setup-dev lint ## set up, then lint, types and tests
	@$(BIN)/mypy > .mypy.log 2>&1 & types=$$!; $(BIN)/python -m pytest -n 4 --dist worksteal; tests=$$?; \
		wait $$types || { cat .mypy.log; exit 1; }; exit $$tests

test-learning: setup-dev ## CartPole and catch to their scores, two seeds each: half an hour
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -p no:cacheprovider --noconftest tests/learning/nightly.py

results: setup-dev ## make the runs of results/ that are missing (hours), then write results/ from them
	@$(BIN)/python results/suite.py run $(ARGS)
	@$(BIN)/python results/suite.py write $(ARGS)

bench: setup-dev ## speed beside peers; ARGS='fleet --json F', ARGS='agent --sizes all', or ARGS=--help
	@$(BIN)/python -m benchmarks $(ARGS)

soak: setup-dev ## growth of every process while a run trains; ARGS='runs/soak --minutes 60'
	@$(BIN)/python -m benchmarks soak $(ARGS)

chaos: setup-dev ## a fleet under faults, then an audit of every step; ARGS='--minutes 30 --goals'
	@PYTHONPATH=.:tests $(BIN)/python -m chaos $(ARGS)

simulate: setup-dev ## histories of a run with faults of storage and network; ARGS='--minutes 10'
	@$(BIN)/python tests/simulation.py $(ARGS)

lint: setup-dev ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup-dev ## mypy, strict
	@$(BIN)/mypy

format: setup-dev ## fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

setup: .venv/base.stamp ## .venv with what a user needs

setup-dev: .venv/dev.stamp ## .venv with what a developer needs

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Dreamfleet needs Python 3.11 or newer: install it, or say PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "Dreamfleet's set-up needs pip for $(PYTHON): install python3-pip."; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version) (once, a minute or two)"
	@$(PYTHON) -m venv --without-pip --clear .venv

.venv/build.stamp: locks/build.txt | .venv/bin/python
	@$(INSTALL_LOCK) locks/build.txt
	@touch $@

.venv/base.stamp: locks/base.txt pyproject.toml | .venv/bin/python
	@$(INSTALL_LOCK) locks/base.txt
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/dev.stamp: locks/dev.txt .venv/base.stamp
	@echo "Installing the developer tools"
	@$(INSTALL_LOCK) locks/dev.txt
	@touch $@

# Locks hold versions and hashes for every platform, and no download address.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"
# What `make train` makes: videos and, with `dreamfleet plot`, curves.
FOR_USERS := --extra classic --extra plot --extra video
EXTRAS := $(FOR_USERS) --extra dev --extra bench --extra dmc --extra atari --extra crafter --extra minigrid --extra ray --extra tensorboard --extra web \
	--extra datasets --extra export --extra hub --extra mlflow --extra sweep

lock: setup-dev ## refresh the lock files
	@$(COMPILE) pyproject.toml locks/build.in $(EXTRAS) -o locks/dev.txt $(LOCKFLAGS)
	@$(COMPILE) pyproject.toml locks/build.in $(FOR_USERS) -c locks/dev.txt -o locks/base.txt $(LOCKFLAGS)
	@$(COMPILE) locks/build.in -c locks/dev.txt -o locks/build.txt $(LOCKFLAGS)

# Every dependency at its floor, or as new as it gets, in a virtual environment of its own. PYTHON=python3.13 chooses
# another Python. Warnings are no errors here, because other packages deprecate things at their own pace.
TESTS := tests/unit tests/contract
test-lowest: RESOLUTION := --resolution lowest-direct
test-lowest: WHICH := lowest
test-lowest: test-versions ## tests and a short run with the oldest versions that pyproject.toml allows
test-newest: WHICH := newest
test-newest: test-versions ## tests and a short run with the newest versions; PYTHON=python3.13 for another Python

test-versions: setup-dev
	@$(BIN)/uv venv --quiet --clear --python $(PYTHON) .venv-$(WHICH)
	@$(BIN)/uv pip install --quiet --python .venv-$(WHICH) $(RESOLUTION) $(LOCKFLAGS) -r pyproject.toml $(EXTRAS) \
		--extra wandb --editable .
	@.venv-$(WHICH)/bin/python -m pytest -q -p no:cacheprovider -W default -n 2 --dist worksteal $(TESTS)
	@.venv-$(WHICH)/bin/dreamfleet train --logdir .venv-$(WHICH)/run --steps 1200

docs: setup-dev ## write the configuration reference, then make a site of all pages: site/index.html
	@$(BIN)/python docs/configuration.py docs/configuration.md
	@$(BIN)/sphinx-build -q -W --keep-going -E -c docs -d build/doctrees . site
	@echo "The documentation is in site/index.html."

wheel: .venv/build.stamp ## build the wheel into dist/
	@$(BIN)/python -m hatchling build --target wheel --directory dist

clean: ## remove .venv and what tools left behind
	rm -rf .venv .venv-lowest .venv-newest dist build site .mypy.log .mypy_cache .ruff_cache .pytest_cache .hypothesis
