# Everything installs into .venv at the versions in constraints.txt; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_WORKERS ?= 2
PINNED := --no-compile -c constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, each of which would compile the text of every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install docs demo test quick nightly mutants mutants-python lint style check-generated fmt generated bench dist release clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 18

install: $(INSTALLED)  ## create .venv, or bring it up to date

# Modules are compiled as they are imported: most of PyTorch's never are. A pip that is there already installs the new
# one, which takes two thirds of the time of an old one; where there is none, Python's own comes first.
# torch goes before what needs it, at its exact pin, so that no later requirement can pull another build of it. What
# is largest besides comes beside it, with attnc compiled, and its own import, which compiles it, beside the rest: that
# keeps two cores busy.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("attnc needs Python 3.11 or newer; try make PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install -q $(PINNED) --upgrade pip 2> /dev/null || \
	$(BIN)/python -m pip --version 2> /dev/null || $(BIN)/python -m ensurepip
	@{ $(BIN)/python -m pip install -q $(PINNED) --no-deps triton nvidia-cuda-nvrtc; \
	$(BIN)/python -m compileall -q attnc; } > /dev/null 2>&1 & \
	$(BIN)/python -m pip install $(PINNED) setuptools wheel torch; \
	ended=$$?; wait; exit $$ended
	@$(BIN)/python -c 'import torch._dynamo' > /dev/null 2>&1 & \
	$(BIN)/python -m pip install $(PINNED) --no-build-isolation -e '.[dev]'; \
	ended=$$?; wait; exit $$ended
	@touch $@

demo: $(INSTALLED)  ## compile specs/causal_gqa.attn for Triton and verify it on this machine
	$(BIN)/attnc demo

# Types beside the tests: mypy keeps one core busy where it has no cache, and what it says comes last. Several
# processes of it would take a tenth more of all cores.
test: $(INSTALLED)  ## everything CI checks: lint, types, generated/ up to date, tests
	@$(MAKE) --no-print-directory style
	@said=$$(mktemp) && { $(TYPES) > $$said 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --durations=15; ended=$$?; \
	wait $$types || ended=1; echo 'mypy:'; cat $$said; rm -f $$said; exit $$ended; }

# Folders and files that hold quick tests; collecting the others would take as long as these.
QUICK := $(addprefix tests/,syntax model expr plan target test_diagnostics.py test_source.py test_build.py \
	support/test_arguments.py support/test_call.py support/test_triton_call.py kernels/test_one_of_each.py)

quick: $(INSTALLED)  ## what to run on save, within a minute: ruff, plans, printed text, one case of each kernel
	$(BIN)/ruff check -q .
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal -m quick $(QUICK)

nightly: $(INSTALLED)  ## for hours: new examples, long tests, both ends of the versions that are allowed
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --durations=30
	$(BIN)/python tools/version_ends.py

N ?= 200
SEED ?= 0

mutants: $(INSTALLED)  ## change N kernels at random places (N=200, SEED=0), and say which of it 'attnc verify' sees
	$(BIN)/python -m tools.mutants --count $(N) --seed $(SEED) --together 8 --heavy

PACKAGE ?= expr

mutants-python: $(INSTALLED)  ## change N places of attnc's PACKAGE (PACKAGE="expr plan"), and say which its tests see
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[mutants-python]'
	$(BIN)/python -m tools.mutants.python $(PACKAGE) --count $(N) --seed $(SEED)

TYPES := $(BIN)/mypy --explicit-package-bases attnc tests examples tools

lint: style  ## ruff and mypy --strict
	$(TYPES) --num-workers $(PYTEST_WORKERS)

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-generated: $(INSTALLED)  ## whether generated/ is what specs/ say; 'make test' sees it too
	$(BIN)/python -m attnc compile --check

docs: $(INSTALLED)  ## build the documentation as a site, docs/_site; a link that leads nowhere fails
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_site/.doctrees docs docs/_site

fmt: $(INSTALLED)  ## format the Python code and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: $(INSTALLED)  ## write generated/ again from specs/
	$(BIN)/python -m attnc compile --force

bench: $(INSTALLED)  ## time the kernels against PyTorch (needs a GPU)
	$(BIN)/attnc bench

dist: $(INSTALLED)  ## build the sdist and the wheel into dist/
	$(BIN)/python tools/release.py --build

release: $(INSTALLED)  ## test, build sdist and wheel, tag the version; CHANGELOG.md and the version have to agree
	$(BIN)/python tools/release.py --check
	$(MAKE) --no-print-directory test
	$(BIN)/python tools/release.py

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find attnc tests generated -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
