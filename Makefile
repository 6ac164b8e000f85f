# `make demo` and `make test` are what a newcomer needs, both as root. CONTRIBUTING.md explains the rest.
PYTHON ?= python3
BIN := .venv/bin
GUEST := $(wildcard guest/*.go guest/*/*.go) guest/go.mod
# Tests that need neither root, a VM nor the internet, without the longest ones.
FAST := -m 'not (slow or heavy or qemu or root or network)' --numprocesses 2 --dist worksteal

# Where each run of pytest leaves junit.xml and durations.txt: seconds by file, fixture and test.
STEAD_TEST_REPORT ?= .test-report
PYTEST := $(BIN)/pytest --junit-xml=$(STEAD_TEST_REPORT)/junit.xml

# Three processes for two cores, if each has 3 GiB of memory: for half of their time tests wait, for a guest, a
# timer or a disk. WORKERS=2 sets another number.
WORKERS ?= $(shell memory=$$(($$(getconf _PHYS_PAGES) / 786432)); workers=$$((($$(nproc) * 3 + 1) / 2)); \
	echo $$((memory < 1 ? 1 : memory < workers ? memory : workers)))

# Without compiled modules each of the hundreds of processes that the tests start would compile Stead again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast coverage trials trial-kvm trial-browser trial-examples trial-guides trial-mounts dist trial-dist fuzz fuzz-screen check style types guest fix setup hooks bench clean

demo: .venv/.ready
	$(BIN)/stead demo

test: .venv/.ready check
	$(PYTEST) --numprocesses $(WORKERS) --dist worksteal

test-fast: .venv/.ready
	$(PYTEST) $(FAST)

coverage: .venv/.ready
	$(PYTEST) $(FAST) --cov --cov-report=term:skip-covered

trials: .venv/.ready
	$(PYTEST) -m slow

trial-kvm: .venv/.ready
	$(BIN)/python scripts/trial-kvm

trial-browser: .venv/.ready
	command -v chromium >/dev/null && command -v certutil >/dev/null || apt-get install -y -qq --no-install-recommends chromium libnss3-tools
	$(PYTEST) -m slow tests/conformance -k browser

trial-examples: .venv/.ready
	$(PYTEST) -m slow tests/examples

trial-guides: .venv/.ready
	test -n "$(STEAD_GUIDES)" || { echo "set STEAD_GUIDES to a folder with the text of the guides"; exit 1; }
	$(PYTEST) -m slow tests/conformance/test_guides.py tests/conformance/test_networks.py tests/conformance/test_vpc_guides.py

trial-mounts: .venv/.ready
	$(PYTEST) -m slow tests/agent_clients/test_openai_buckets.py

# Exactly what is given to others: sdist and wheel, the guest agent in the latter.
dist: .venv/.ready
	rm -rf dist
	$(BIN)/hatchling build --directory dist

trial-dist: dist
	$(BIN)/pytest -m slow tests/install

fuzz: .venv/.ready
	scripts/fuzz

fuzz-screen: .venv/.ready
	scripts/fuzz-screen

check: .venv/.ready
	+$(MAKE) --no-print-directory --jobs=2 --output-sync style types guest

style: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: .venv/.ready
	$(BIN)/mypy

guest: .venv/.ready
	scripts/check-guest

fix: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	scripts/check-guest --fix
	$(BIN)/python scripts/unasync
	$(BIN)/python scripts/sdk-reference
	$(BIN)/python scripts/module-tables

setup: .venv/.ready

hooks: .venv/.ready
	$(BIN)/pre-commit install

.venv/.ready: pyproject.toml constraints.txt hatch_build.py scripts/setup $(GUEST)
	PYTHON=$(PYTHON) scripts/setup
	touch $@

bench: .venv/.ready
	bench/engine
	bench/checkpoints
	bench/api
	bench/git
	bench/pty
	bench/edge
	bench/agents
	bench/networks
	bench/fairness

clean:
	rm -rf .venv dist .test-report
