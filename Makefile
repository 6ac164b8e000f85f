# Everything a newcomer needs: `make demo` and `make test`, as root.
PYTHON ?= python3
BIN := .venv/bin
GUEST := $(wildcard guest/*.go) guest/go.mod

.PHONY: demo test trials check style types guest setup bench clean

demo: .venv/.ready
	$(BIN)/stead demo

# Two processes at once: while one test waits for something, another has the processor.
test: .venv/.ready check
	$(BIN)/pytest --numprocesses 2 --dist worksteal

trials: .venv/.ready
	$(BIN)/pytest -m slow

check: .venv/.ready
	+$(MAKE) --no-print-directory --jobs=2 --output-sync style types guest

style: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.ready
	$(BIN)/mypy

guest: .venv/.ready
	scripts/check-guest

setup: .venv/.ready

.venv/.ready: pyproject.toml hatch_build.py scripts/setup $(GUEST)
	PYTHON=$(PYTHON) scripts/setup
	touch $@

bench: .venv/.ready
	bench/engine
	bench/checkpoints
	bench/api
	bench/git

clean:
	rm -rf .venv dist
