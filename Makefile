# Everything a bare Linux machine with Python >= 3.11 needs: each target sets up its own environment first.
#
#   make test    lint, then all tests
#   make demo    the whole path on the shipped checkpoint, into demo-output/
#   make format  rewrite the sources as `make lint` wants them
#
# To save gigabytes, point pip at PyTorch's CPU wheels (PIP_FIND_LINKS or pip.conf): a CPU build is taken
# where one is offered.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready
BIN := $(VENV)/bin
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: test lint demo format clean

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: $(READY)
	$(BIN)/palimpsa-surgery demo --output demo-output --overwrite

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo-output build *.egg-info src/*.egg-info
