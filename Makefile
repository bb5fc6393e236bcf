# make demo | make test | make test-all | make check | make docs | make install | make dist.  Needs Python >= 3.11, make and a C compiler.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu makes pip take the CPU build of torch where the default would be CUDA's.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
JOBS ?= 2

# pip writes into every script the path of the environment that it belongs to. After `cp -r` or `mv` of a clone the scripts
# still run the other clone: MOVED_FROM is that path then, else empty.
MOVED_FROM := $(shell made=$$(sed -n '1,2s|^[^/]*\(/.*\)/python[0-9.]*.*|\1|p' $(BIN)/draftsmith 2>/dev/null); \
  [ -z "$$made" ] || [ "$$made" -ef $(BIN) ] || echo "$$made")

.PHONY: install install-test browser demo test test-slow test-all check docs format pair dist $(if $(MOVED_FROM),$(VENV)/installed)

install: $(VENV)/installed
install-test: $(VENV)/installed-test

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("draftsmith needs Python >= 3.11, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(if $(MOVED_FROM),echo "$(VENV) was made as $(MOVED_FROM) and does not work here; making it anew"; rm -rf $(VENV))
	@echo "installing the pinned set into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) -e '.[test]'
	@touch $@

demo: install
	@$(BIN)/draftsmith demo --out out/demo

pair: install
	@$(BIN)/draftsmith demo --rebuild_pair out/pair

# Tests of the report open a browser when there is one. Under CI one is installed when that is possible.
browser:
	@if [ -n "$$CI" ] && ! command -v chromium >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
	  echo "installing chromium"; (apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 || echo "chromium could not be installed; its tests will skip"; fi

# One thread per test process: tiny models gain nothing from more, and the processes do not compete for the cores.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q --durations=20

# Everything but what is marked slow: minutes.
test: install-test browser
	@$(PYTEST) -m "not slow" tests

# Launches of several processes, runs killed at many points, exhaustive combinations, the installed wheel.
test-slow: install-test browser
	@$(PYTEST) -m slow tests

test-all: test test-slow

# The site, from docs/ and the code, into out/site; a broken link or a page that no menu has is an error. No network.
docs: install-test
	@$(BIN)/mkdocs build --strict --quiet && echo "documentation: out/site/index.html"

# The sdist, and the wheel built from it.
dist: install-test
	@$(BIN)/python -m build --no-isolation

check: install-test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install-test
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
