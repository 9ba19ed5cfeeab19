# Two commands for everybody: `make serve` talks to a real model, `make test` proves the tree.
# PIP_* variables pass through to pip (mirrors, proxies, caches). ARGS="..." goes to the command run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LONG := .venv-long
ARGS ?=

.PHONY: setup serve test test-long test-system soak check compat bench bench-scheduler mutants clean

# The kernels come last: they are built once, and again whenever their sources or the compiler change.
setup: $(VENV)/.setup
	@$(BIN)/pointsman fetch
	@$(BIN)/python -m kernels.cpu_build

# A torch that the Python already has is kept, through --system-site-packages; otherwise the lock's CPU build comes.
# Debian's python3 lacks ensurepip, with which venv installs pip: there the pip at hand does it.
$(VENV)/.setup: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is no Python 3.11 or newer; name one: make setup PYTHON=python3.12"; exit 1; }
	@if [ ! -x $(BIN)/pip ]; then \
	  echo "Creating $(VENV)"; \
	  if $(PYTHON) -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' 2>/dev/null; \
	  then echo "Keeping the torch that $(PYTHON) has"; site=--system-site-packages; fi; \
	  if $(PYTHON) -c 'import ensurepip' 2>/dev/null; \
	  then $(PYTHON) -m venv --clear $$site $(VENV); \
	  else $(PYTHON) -m venv --clear --without-pip $$site $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet --ignore-installed pip; fi; fi
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  echo "Installing torch, about 190 MB (CPU build; see README where your index gives only CUDA builds)"; \
	  $(BIN)/pip install --quiet "$$(grep '^torch==' requirements.lock)"; fi
	@echo "Installing the locked dependencies, about 45 MB"
	@grep -v '^torch==' requirements.lock > $(VENV)/requirements.txt
	@$(BIN)/pip install --quiet -r $(VENV)/requirements.txt
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# FlashInfer imports without a GPU; the rest of what it asks for is for kernels that nobody here calls: no dependencies.
$(VENV)/.setup-dev: $(VENV)/.setup requirements-dev.lock requirements-flashinfer.lock
	@echo "Installing what tests and checks need, about 50 MB"
	@$(BIN)/pip install --quiet -r requirements-dev.lock
	@echo "Installing FlashInfer, whose signatures the tests compare with: 101 MB to download, 730 MB on disk"
	@$(BIN)/pip install --quiet --no-deps --no-compile -r requirements-flashinfer.lock
	@touch $@

serve: setup
	@$(BIN)/pointsman serve $(ARGS)

test: $(VENV)/.setup-dev setup
	@$(BIN)/python -m pytest $(ARGS)

# Apart from the server's environment, whose pytest would load the plugins of these.
$(LONG)/.setup: requirements-long.lock | $(VENV)/.setup
	@echo "Installing what the long tests need, about 20 MB, into $(LONG)"
	@$(BIN)/python -m venv --clear --without-pip $(LONG)
	@$(BIN)/pip --python $(LONG)/bin/python install --quiet -r requirements-long.lock
	@touch $@

test-long: $(VENV)/.setup-dev $(LONG)/.setup setup
	@$(BIN)/python -m pytest tests/long tests/e2e tests/engine_core tests/kernels -m long $(ARGS)

# Installs what it needs from Debian with apt-get (as root; else it says what to install) and from pip into .venv-system.
test-system: $(VENV)/.setup-dev setup
	@$(BIN)/python -m pytest tests/system -m system $(ARGS)

soak: $(VENV)/.setup-dev setup
	@$(BIN)/python tests/bench/soak.py $(ARGS)

check: $(VENV)/.setup-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_house.py

compat: $(VENV)/.setup-dev setup
	@$(BIN)/python tests/compat/run.py $(ARGS)

# Pointsman alone; beside its peers, which are installed by hand: tests/bench/README.md.
bench: setup
	@$(BIN)/python tests/bench/peers.py --peer pointsman --quantization --repeat 1 --only W1,W2,W3,W4,W5,W6 $(ARGS)

bench-scheduler: setup
	@$(BIN)/python tests/bench/scheduler.py
	@$(BIN)/python tests/bench/chapter.py $(ARGS)

mutants: $(VENV)/.setup-dev
	@$(BIN)/python tests/mutants.py $(ARGS)

clean:
	@rm -rf $(VENV) $(LONG) .venv-system .compat build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
