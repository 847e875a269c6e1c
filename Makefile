# Variables to set on the command line, as in `make test VENV=/somewhere/else`:
VENV = .venv
PYTHON = python3
# auto: gpu where the driver shows a CUDA device and nvcc is there, cpu elsewhere
VARIANT = auto
# where pip is to look for torch's CPU build, if not in the indices it is set up with
TORCH_INDEX =
# how many damaged files `make fuzz` reads
FILES = 100000
# how many processes run tests: one more than processors of a small machine, as tests wait for deadlines
PROCESSES = 3

BIN = $(VENV)/bin

.PHONY: help install compiler browser test check test-all lint demo bench figures fuzz clean

help:
	@echo "make install   set-up alone: VENV=$(VENV), pinned dependencies, the extension"
	@echo "make demo      set-up, a log, its profile, plans, how they compare, a DLRM trained on 2 ranks"
	@echo "make test      set-up, then the tests that notice most faults per second"
	@echo "make check     set-up, a CUDA compiler and Chromium, then the other tests and linters that CI runs"
	@echo "make test-all  both and the slow tests, with eight times the examples"
	@echo "make lint      ruff, mypy, clang-format and cppcheck alone"
	@echo "make bench     the measurements of benchmarks/README.md"
	@echo "make figures   the timings of README.md and docs/results.md, into docs/figures.json and the pages"
	@echo "make fuzz      damaged files through every reader, wild arguments through every operator"
	@echo "make clean     removes what was built; VENV stays"
	@echo "variables      VENV=$(VENV) PYTHON=$(PYTHON) VARIANT=auto|cpu|gpu FILES=$(FILES) PROCESSES=$(PROCESSES)"

install:
	@$(PYTHON) scripts/install.py $(VENV) $(VARIANT) $(TORCH_INDEX)

compiler: install
	@$(PYTHON) scripts/install.py $(VENV) compiler

browser: install
	@$(PYTHON) scripts/install.py $(VENV) browser

# Each process takes a part of the tests in their order, and then some that another one has left:
# those of a file mostly share what they start.
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal --durations 10

# tests/groups.py decides which group a test is in.
test: install
	$(PYTEST) -m "not more and not check and not slow" --hypothesis-profile few

check: install compiler browser
	$(PYTEST) -m "drawn or more or check"

test-all: install compiler browser
	$(PYTEST) --hypothesis-profile thorough

lint: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python scripts/lint_cpp.py

demo: install
	PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh

bench: install
	PATH="$(abspath $(BIN)):$$PATH" benchmarks/run.sh

figures: install
	PATH="$(abspath $(BIN)):$$PATH" benchmarks/run.sh timed

# An extension of its own, that AddressSanitizer watches.
ASAN = -fsanitize=address -g1 -fno-omit-frame-pointer
fuzz: install
	CFLAGS="$(ASAN)" LDFLAGS="-fsanitize=address" $(BIN)/python setup.py --quiet build_ext \
		--build-lib build/asan/lib
	$(BIN)/python -m scripts.fuzz.operators --calls 100 --asan build/asan/lib
	$(BIN)/python -m scripts.fuzz.files --count $(FILES)

clean:
	rm -rf build dist *.egg-info oper/_C*.so oper/_cuda.so oper/_nvshmem.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
