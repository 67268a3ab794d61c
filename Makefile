# From a bare clone with Python 3.10 or later and a C compiler: make demo, train, test, lint, build, test-bundle,
# test-serving, test-emulator, fuzz, soak, sanitize, wheel.
# Settings: PYTHON (interpreter for the virtual environment), UV (what installs; default uv where there is one, empty: pip),
# PROFILE (of make build: demo, bf16 or full), JOBS (compile processes), MINUTES (of make soak), ARGS (of pytest, the demo,
# train, fuzz, soak or sanitize).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-run
TESTABLE := $(VENV)/.installed-test
LINTABLE := $(VENV)/.installed-lint
TRANSFORMERS := $(VENV)/transformers
SERVING := .venv-serving
# Each has requirements/serving-ENGINE.txt, plugins/glulam-ENGINE and tests/serving/test_ENGINE*.py.
ENGINES := sglang vllm
PROFILE ?= bf16
# What is compiled already is kept, and a bundle that has these functions stays as it is.
BUILD = $(BIN)/glulam build --keep $(if $(JOBS),--jobs $(JOBS))

# Packages are compiled when they are first imported: compiling all of them takes longer than installing them.
# The virtual environment has a uv of its own, to test requirements with: that is not what the user installs by.
UV ?= $(filter-out $(abspath $(BIN)/uv),$(shell command -v uv 2>/dev/null))
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --no-compile)
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo train test test-serving test-bundle test-emulator test-gpu fuzz soak sanitize lint build wheel clean

demo: $(INSTALLED)
	$(BUILD) --profile demo
	$(BIN)/python -m glulam.demo $(ARGS)
	@echo "Next: $(BIN)/glulam doctor (after 'source $(BIN)/activate': glulam doctor)"

# A machine without a GPU trains on the CPU, by torch's operators alone.
train: $(INSTALLED)
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BUILD) --profile $(PROFILE); fi
	$(BIN)/python examples/train_moe.py $(ARGS)

# One OpenMP thread a worker: two workers of two threads each on two cores are up to 100 times slower.
test: $(TESTABLE) $(TRANSFORMERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 $(ARGS)

# Plugins of serving engines, on the CPU, in an environment of their own: engines want other versions of torch. A process
# for each, since each sets up ranks and replaces parts of torch.
test-serving:
	$(MAKE) VENV=$(SERVING) $(ENGINES:%=$(SERVING)/.installed-serving-%)
	$(foreach engine,$(ENGINES),OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest -q \
	  $(wildcard tests/serving/test_$(engine)*.py) $(ARGS) && )true

# The whole table: every kernel compiles, none spills or waits, and a sample compiled again has the same device code.
test-bundle: $(TESTABLE)
	$(BUILD) --profile full
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 -m bundle $(ARGS)

# Every function of two architectures, emulated on the CPU: about 18 minutes of one core once all is compiled, nine of two;
# the first time, with some 900 stages to compile, far longer. Only files that have such tests are collected, and the
# longest tests come first.
test-emulator: $(TESTABLE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 -m emulator \
	  $$(grep -l 'mark\.emulator' tests/test_*.py | sort -r) $(ARGS)

test-gpu: $(TESTABLE)
	$(BUILD) --profile full
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

# docs/fuzzing.md says what the next three do. ARGS='--device cuda' fuzzes the kernels of the bundle.
fuzz: $(TESTABLE)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

soak: $(TESTABLE)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m soak $(or $(MINUTES),10) $(ARGS)

sanitize: $(TESTABLE)
	PYTHONPATH=tests $(BIN)/python -m sanitize $(ARGS)

lint: $(LINTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build: $(INSTALLED)
	$(BUILD) --profile $(PROFILE)

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(SERVING) build dist glulam.egg-info python/glulam/_bundle

$(INSTALLED): requirements/run.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is not Python 3.10 or later; choose one that is: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(if $(UV),:,$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null) || \
	  { echo "$(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || \
	  { echo "no C compiler ($(CC)): install gcc or clang; linking the kernels needs one" >&2; exit 1; }
	@echo "Installing torch and the kernels' compiler into $(VENV): about 3 GB to download, 0.4 GB without CUDA"
	$(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON),$(PYTHON) -m venv) $(VENV)
	$(INSTALL) --requirement $<
	$(INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.installed-%: requirements/%.txt $(INSTALLED)
	@echo "Installing what make $* needs besides"
	$(INSTALL) --requirement $<
	touch $@

# Engines and plugins come without dependencies: torch is there, and what an engine imports in tests is in serving.txt.
$(VENV)/.installed-serving-%: requirements/serving-%.txt plugins/glulam-%/pyproject.toml $(VENV)/.installed-serving
	$(INSTALL) --no-deps --requirement $<
	$(INSTALL) --no-deps --no-build-isolation --editable plugins/glulam-$*
	touch $@

$(VENV)/.installed-serving: $(TESTABLE)

# transformers' own tests are in its source distribution alone. Where that cannot be had, they are skipped.
$(TRANSFORMERS): requirements/test.txt $(TESTABLE)
	rm -rf $@ && mkdir $@
	-grep ^transformers $< >$@/pin.txt \
	  && $(BIN)/python -m pip download --no-deps --no-build-isolation --no-binary :all: --dest $@ -r $@/pin.txt \
	  && tar -xzf $@/*.tar.gz -C $@ --strip-components 1 && rm $@/*.tar.gz
