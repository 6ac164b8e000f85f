# Everything a newcomer needs: `make demo` and `make test`, as root.
PYTHON ?= python3
BIN := .venv/bin
GUEST := $(wildcard guest/*.go) guest/go.mod

.PHONY: demo test trials check setup bench clean

demo: .venv/.ready
	$(BIN)/stead demo

test: .venv/.ready check
	$(BIN)/pytest

trials: .venv/.ready
	$(BIN)/pytest -m slow

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	scripts/check-guest

setup: .venv/.ready

.venv/.ready: pyproject.toml hatch_build.py scripts/setup $(GUEST)
	PYTHON=$(PYTHON) scripts/setup
	touch $@

bench: .venv/.ready
	bench/engine
	bench/checkpoints

clean:
	rm -rf .venv dist
