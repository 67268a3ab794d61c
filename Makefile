# From a bare clone with Python 3.10 or later and a C compiler: make demo, make train, make test, make lint, make build.
# Settings: PYTHON (interpreter for the virtual environment), JOBS (compile processes), ARGS (of pytest, the demo or train).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUNDLE := python/glulam/_bundle/sm_90a/manifest.json
BRIDGE := $(addprefix ffi_bridge/,_version.py build.py cache.py compiler.py link.py manifest.py objects.py resources.py scratch.py sources.py toolchain.py worker.py)
KERNELS := $(shell find cute_kernels -name '*.py')

.PHONY: demo train test test-gpu lint build wheel clean

demo: $(BUNDLE)
	$(BIN)/python -m glulam.demo $(ARGS)

train: $(BUNDLE)
	$(BIN)/python examples/train_moe.py $(ARGS)

# One OpenMP thread a worker: two workers of two threads each on two cores are up to 100 times slower.
test: $(BUNDLE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 $(ARGS)

test-gpu: $(BUNDLE)
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build: $(BUNDLE)

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist glulam.egg-info python/glulam/_bundle

# The manifest is written last, so it is the bundle's stamp.
$(BUNDLE): $(INSTALLED) $(BRIDGE) $(KERNELS)
	$(BIN)/glulam build --arch sm_90a $(if $(JOBS),--jobs $(JOBS))

$(INSTALLED): requirements-dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is not Python 3.10 or later; choose one that is: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || \
	  { echo "no C compiler ($(CC)): install gcc or clang; linking the kernels needs one" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@
