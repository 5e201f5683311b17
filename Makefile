# Every target makes its own environment: .venv, from the first Python >= 3.12 found, with the project and its test extra.
.PHONY: venv demo test test-oldest lint bench clean
SHELL := /bin/bash
VENV := .venv
PYTHON = $(VENV)/bin/python
OLDEST := .venv-oldest
INSTALL = -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2

demo test test-oldest: export JAX_PLATFORMS = cpu

demo: venv
	$(PYTHON) -m experiments.demo

test: venv
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist loadfile tests

# The operators, layers and lowerings on the oldest JAX that setup.cfg allows.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(sort $(wildcard \
	  tests/test_ops_*.py tests/test_gates.py tests/test_packing.py tests/test_layers_*.py tests/test_kernel_lowering.py))

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: venv
	$(PYTHON) -m experiments.bench

venv: $(VENV)/.ready

$(VENV)/.ready: setup.cfg .ci/python
	"$$(.ci/python)" -m venv --clear $(VENV)
	$(PYTHON) $(INSTALL) --editable '.[test]'
	touch $@

$(OLDEST)/.ready: setup.cfg .ci/python
	"$$(.ci/python)" -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python $(INSTALL) --editable '.[test]' 'jax==0.11.2' 'jaxlib==0.11.2'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST)
