# Every task of the laboratory; `make help` lists them. GNU make 3.81 and a POSIX shell are enough.

PYTHON  ?= python3
VENV    ?= .venv
PORT    ?=
BROWSER ?=
PICTURES ?=
ONLY    ?=
RANKS   ?= 2
MPI     ?= mpich
SIZES   ?= 4,1KiB,256KiB,4MiB,64MiB

BUILD_TOOLS   := pip scikit-build-core nanobind cmake ninja
INSTALLED     := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_HUB := $(VENV)/.installed-hub
SOURCES       := pyproject.toml constraints.txt cluster/laptop/install.py CMakeLists.txt $(wildcard csrc/*.* csrc/cuda/*.*)
SOURCES       += $(wildcard cluster/environment/etc/*/*.* cluster/environment/etc/*/*/*.*)
PIP           := $(VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help lab install hub slides test test-all test-mpi test-gpu frameworks sanitize bench lint wording house clean

help: ## show this list
	@echo 'usage: make TARGET [VARIABLE=value ...]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12
	@echo 'variables:'
	@echo '  PORT=8899     serve there (default: the first free port from 8888)'
	@echo '  BROWSER=no    only print the address'
	@echo '  PYTHON=...    the Python, 3.11 or newer, that $(VENV) is made from (default: python3)'
	@echo '  VENV=...      the environment (default: .venv)'
	@echo '  PICTURES=yes  for make slides: run the notebooks, and show their pictures'
	@echo '  ONLY=ring     for make test and make test-all: tests with this word in their name, or their file'"'"'s'
	@echo '  RANKS=4 SIZES=4,1MiB    for make bench'

lab: $(INSTALLED) ## serve JupyterLab on notebooks/; installs first where needed
	@$(VENV)/bin/python cluster/laptop/lab.py --port='$(PORT)' --browser='$(BROWSER)'

install: $(INSTALLED) ## make .venv with exact versions, build csrc/, say what works
	@PATH="$(abspath $(VENV)/bin):$$PATH" $(VENV)/bin/hpdl doctor

hub: $(INSTALLED_HUB) ## install JupyterHub and its proxy as well; then: .venv/bin/hpdl hub --help
	@sh cluster/hub_proxy.sh '$(VENV)'

slides: $(INSTALLED) ## write slides of every notebook to build/slides/; PICTURES=yes runs the notebooks for theirs
	@$(VENV)/bin/python notebooks/slides.py $(if $(filter yes,$(PICTURES)),--execute)

test: $(INSTALLED_DEV) ## run the tests; the last line counts them; ONLY=ring: those with this word in their name
	@$(VENV)/bin/python -m tests.run_all --only '$(ONLY)'

test-all: $(INSTALLED_DEV) ## run what `make test` leaves out: hub, browser, Slurm, Open MPI; installs those, as root
	@$(VENV)/bin/python -m tests.run_all --all --only '$(ONLY)'

test-mpi: $(INSTALLED_DEV) ## run the rank tests under one MPI: MPI=mpich, openmpi or intel
	@$(VENV)/bin/python -m tests.run_all --mpi $(MPI)

test-gpu: ## run what needs a GPU: wants nvcc, and a PYTHON whose torch has CUDA
	@'$(PYTHON)' tests/gpu/run.py .venv-gpu build/gpu

frameworks: $(INSTALLED) ## train by PyTorch, JAX, TensorFlow and gRPC on emulated hosts, as root; record what 14 shows
	@$(VENV)/bin/python -m hpdl_lab.cli.frameworks

sanitize: $(INSTALLED_DEV) ## csrc/ under three sanitizers: 13,200 cases of bad input
	@$(VENV)/bin/python tests/border/run.py --sanitize

bench: $(INSTALLED) ## race this package's all-reduce against MPI and gloo, in the cycle of a step
	@$(VENV)/bin/hpdl bench all_reduce --cycle --ranks $(RANKS) --sizes $(SIZES) --against mpi,gloo

lint: $(INSTALLED_DEV) ## check style, types and English: ruff, pyrefly, tests/prose.py, clang-format, shellcheck, hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python --output-format min-text
	$(VENV)/bin/python tests/prose.py
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard csrc/*.* csrc/cuda/*.*)
	$(VENV)/bin/shellcheck $(wildcard cluster/*.sh cluster/*/*.sh cluster/*/*.pbs)
	$(VENV)/bin/hadolint --no-color cluster/docker/Dockerfile .binder/Dockerfile

wording: $(INSTALLED_DEV) ## write tests/wording/ anew: what errors say, as tests provoke them
	@HPDL_WORDING=write $(VENV)/bin/python -m pytest -q -p no:nbval -n2 --dist=loadfile tests

house: $(INSTALLED_DEV) ## the size and shape of the package, in figures
	@$(VENV)/bin/python tests/house.py --path

clean: ## remove .venv, builds and caches; notebooks stay as they are
	rm -rf $(VENV) .venv-openmpi .venv-intel .venv-gpu .venv-frameworks build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds what was installed: a clone that was moved, or whose files were renamed, is installed again.
STATE := $(CURDIR) $(shell find hpdl_lab -name '*.py' | LC_ALL=C sort | cksum)
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(STATE))
.PHONY: $(INSTALLED) $(INSTALLED_DEV) $(INSTALLED_HUB)
endif

$(INSTALLED_DEV): EXTRA := dev
$(INSTALLED_HUB): EXTRA := hub
$(INSTALLED) $(INSTALLED_DEV) $(INSTALLED_HUB): $(SOURCES)
	@sh cluster/laptop/needs.sh '$(PYTHON)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) $(BUILD_TOOLS)
	$(VENV)/bin/python cluster/laptop/install.py $(EXTRA)
	@for stamp in $(sort $(INSTALLED) $@); do echo '$(STATE)' > $$stamp; done
