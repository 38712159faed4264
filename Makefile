# Each target makes .venv itself on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test style test-gpu clean

demo: $(STAMP)
	$(BIN)/verl-sharding demo

test: $(STAMP) style
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/gpu

clean:
	rm -rf $(VENV)

$(STAMP): setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -e '.[cpu,test]'
	touch $@
