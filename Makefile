# One command sets up, one checks everything that CI checks. `make` lists them.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON := .venv/bin/python
# uv from the machine, or a private copy installed with pip.
UV := $(shell command -v uv || echo target/uv/bin/uv)
# The interpreter that the crate is linked against is the one of the environment.
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python
# One folder for everything that is built, models for tests included.
export PREFILL_ROUTER_TEST_CACHE ?= $(CURDIR)/target/test-models

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(filter target/%,$(UV)) ## Make .venv with everything, the compiled package included
	$(UV) sync --locked

target/uv/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --target target/uv uv

.PHONY: demo
demo: setup ## Features of a few prompts from a real model, and which prompts are alike
	$(PYTHON) examples/demo.py "$$($(PYTHON) tests/fixtures/smollm2.py)"

.PHONY: probe
probe: setup ## From a CSV of labelled prompts to a probe per layer, on the same model
	$(PYTHON) examples/probe.py "$$($(PYTHON) tests/fixtures/smollm2.py)"

.PHONY: test
test: test-rust test-python ## Every test, Rust and Python

.PHONY: test-rust
test-rust: setup ## The crate: unit, integration and documentation tests
	cargo build --locked --no-default-features
	cargo test --locked --features metrics

.PHONY: test-python
test-python: setup ## The wheel
	$(PYTHON) -m pytest

.PHONY: test-all
test-all: test ## The tests, and the sweep over every architecture
	PREFILL_ROUTER_SWEEP=all $(PYTHON) -m pytest tests/sweep

.PHONY: soak
soak: setup ## Many callers for ten minutes (SOAK_SECONDS), memory watched; fifty fresh processes that load at once
	cargo test --locked --test rust -- --ignored --nocapture --test-threads=1 soak_

.PHONY: test-kill
test-kill: setup ## 200 bulk runs killed at random instants, and gone on with
	PREFILL_ROUTER_KILLS=200 $(PYTHON) -m pytest -s tests/kill

.PHONY: lint
lint: setup ## Format, clippy, ruff, types, stubs, documentation
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --all-targets --features metrics -- -D warnings
	cargo clippy --locked --no-default-features --all-targets -- -D warnings
	cargo clippy --locked --features python -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --quiet --features metrics
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	$(PYTHON) -m mypy.stubtest prefill_router._core

.PHONY: format
format: setup ## Rewrite sources to the formatters' taste
	cargo fmt
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.PHONY: bench
bench: setup ## Speed, memory and crossing against the plain forward (PROMPTS=file.jsonl, minutes)
	$(PYTHON) benches/forward.py "$$($(PYTHON) tests/fixtures/smollm2.py)" $(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: bench-hybrid
bench-hybrid: setup ## Speed on the shape of Qwen3.5-0.8B with random weights (3 GB, 10 GB of memory)
	$(PYTHON) benches/forward.py "$$($(PYTHON) tests/fixtures/encoder_shape.py)" --only speed --limit 12 --rounds 2 \
		$(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: bench-bulk
bench-bulk: setup ## Bulk extraction beside the bare engine, and 100,000 rows without a model (PROMPTS=file.jsonl, minutes)
	$(PYTHON) benches/bulk.py "$$($(PYTHON) tests/fixtures/smollm2.py)" $(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: bench-serving
bench-serving: setup ## Thirty-two callers, a mutex against the queue; what the queue itself costs (PROMPTS=file.jsonl)
	cargo bench --locked --bench serving -- "$$($(PYTHON) tests/fixtures/smollm2.py)" $(if $(PROMPTS),--prompts $(PROMPTS))
	cargo bench --locked --bench queue

.PHONY: docs
docs: setup ## The crate's documentation, in target/doc
	cargo doc --locked --no-deps --features metrics

.PHONY: clean
clean: ## Remove everything that was built
	rm -rf target .venv python/prefill_router/_core*.so
