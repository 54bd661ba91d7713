# What CI runs and people run. `make help` lists the targets.
VENV := .venv
VENV312 := .venv-py312
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
TOOLS := $(VENV)/.tools
TOOLS312 := $(VENV312)/.tools
SEEDS ?= 200
ENGINES := tests/e2e tests/chaos tests/clients
# Minutes of a core each, and nothing in them depends on Python's version.
ELSEWHERE := */integration/test_bench_* */sim/test_wave_schedules.py
# Prebuilt code of the model hub is never wanted, and its client must not wait for a network.
export HF_HUB_OFFLINE := 1
# Programs of the environment (buf, protoc plugins) are found by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv install demo test test-fast test-py312 e2e clients clients-all ci-system certify-cpu sim sim-waves bench gen lint type imports fmt contract-release news clean
.DEFAULT_GOAL := help

help: ## List the targets.
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(BIN)/python:
	@python=$$(sh scripts/find-python 3.11) && "$$python" -m venv $(VENV)

$(RUNTIME): requirements/light.txt requirements/cpu.txt pyproject.toml | $(BIN)/python
	@$(BIN)/python scripts/install.py requirements/cpu.txt
	@touch $@

$(TOOLS): requirements/dev.txt $(RUNTIME)
	@$(BIN)/python scripts/install.py requirements/dev.txt
	@touch $@

$(TOOLS312): requirements/light.txt requirements/dev.txt pyproject.toml
	@python=$$(PYTHON= sh scripts/find-python 3.12) && { test -x $(VENV312)/bin/python || "$$python" -m venv $(VENV312); }
	@$(VENV312)/bin/python scripts/install.py requirements/light.txt requirements/dev.txt
	@touch $@

venv: $(RUNTIME) ## Make .venv with the CPU stack: what `make demo` needs.

install: $(TOOLS) ## Make .venv with the CPU stack and the developer's tools.

demo: $(RUNTIME) ## Build the model, start the stack, ask it a question over HTTP and gRPC, stop it.
	@$(BIN)/splitwave demo

# Both halves of the first line take one core each; real engines take all there are, so they come last.
test: install lint ## All that CI runs, real vLLM engines included.
	@mkdir -p build
	@$(MAKE) --no-print-directory type imports test-py312 >build/beside.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(ENGINES:%=--ignore=%); code=$$?; \
	wait $$beside || code=1; echo "meanwhile:"; cat build/beside.log; exit $$code
	@$(BIN)/python -m pytest $(ENGINES)

test-fast: install lint type imports ## Lint, types, imports, buf, unit, contract, sim: under 3 minutes.
	@$(BIN)/python -m pytest tests/test_tidy.py tests/unit tests/contract tests/sim

test-py312: ## The tests that need no torch, on Python 3.12, with fewer seeds; says so where there is none.
	@if sh scripts/find-python 3.12 >/dev/null 2>&1; then $(MAKE) --no-print-directory run-py312; \
	else echo "SKIPPED: no Python 3.12 here, so the tests that need no torch ran on 3.11 only"; fi

.PHONY: run-py312
run-py312: $(TOOLS312)
	@$(VENV312)/bin/python -m mypy --cache-dir .mypy_cache/py312
	@PATH="$(CURDIR)/$(VENV312)/bin:$$PATH" SPLITWAVE_SIM_SEEDS=20 $(VENV312)/bin/python -m pytest $(ELSEWHERE:%=--ignore-glob=%) tests/test_tidy.py tests/unit tests/contract tests/sim tests/integration

e2e: install ## Real vLLM engines on the CPU: equality, cancel, fence.
	@$(BIN)/python -m pytest tests/e2e

clients: install ## Other people's clients against a stack: openai, buf curl, vllm bench, smg.
	@$(BIN)/python -m pytest tests/clients

clients-all: install ## And those with large environments: lm-eval, aiperf.
	@$(BIN)/python -m tests.clients.environments lm-eval aiperf
	@SPLITWAVE_CLIENTS=all $(BIN)/python -m pytest tests/clients

ci-system: ## As root on Debian: the browser and the promtool that some tests need.
	@sh scripts/system-packages

certify-cpu: install ## Full certificates for both pools of the demo stack, outputs to 256 tokens, on this CPU: 10 minutes.
	@$(BIN)/python -m tests.clients.environments lm-eval
	@$(BIN)/splitwave certify --model demo --level full --output-max-tokens 256

sim: install ## Seeded faults in virtual time: make sim SEEDS=1000.
	@SPLITWAVE_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/sim

sim-waves: install ## The wave simulation alone, compiled; goes on where it was stopped: SEEDS=1000000.
	@$(BIN)/python -m bench.wave_compiled build/waves
	@cd build/waves && $(CURDIR)/$(BIN)/python -m bench.wave_sim --seeds $(SEEDS) --state waves.state.json

bench: install ## Run the workloads in bench/ and write their results.
	@$(BIN)/python -m bench.run

gen: install ## Generate splitwave/v1alpha1 from proto/, and the documents' tables from code.
	@$(BIN)/python scripts/gen.py splitwave/v1alpha1
	@$(BIN)/python -m scripts.tables

lint: install ## Ruff: rules and format.
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

type: install ## mypy, strict.
	@$(BIN)/python -m mypy

imports: install ## import-linter: the layers of the tree.
	@$(BIN)/lint-imports

fmt: install ## Format, and fix what ruff can fix.
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format
	@$(BIN)/buf format --write proto

contract-release: install ## Make today's proto the baseline that breaking changes are checked against.
	@$(BIN)/buf build proto --output proto/baseline.binpb
	@git --no-pager diff --stat -- proto/baseline.binpb

news: install ## Show the changelog that the fragments would make.
	@$(BIN)/towncrier build --draft --version unreleased

clean: ## Remove caches and built files; the environments stay.
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
