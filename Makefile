# make demo [DEMO=long] | test | test-quick | test-nightly | test-benchmarks | test-torch | test-bridge | test-megatron | test-gpu |
# check-gpu | lint | wheel: each sets up everything it needs in .venv first, once; later calls start at once and work offline.
# PYTHON=/path/to/python picks the interpreter, VENV=folder the environment.

# With it, each of a hundred processes that tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
VENV ?= .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
SOURCES := megatron_lancet tools tests benchmarks docs pretrain_gpt_moe.py setup.py

# Without PYTEST_ARGS: all tests but nightly ones and tests of benchmarks, in two processes, each test file in one of them.
BENCHMARKS := tests/cli/benchmarks
PYTEST_ALL := -n 2 --dist loadfile --no-loadscope-reorder --durations 20 -m "not nightly" --ignore $(BENCHMARKS)

# All unit tests but slow and thorough ones; and against stock Megatron: gradients with one chunk and more in a mocked world and on two
# gloo ranks, losses of the real training loop.
LOSSES := tests/parity/runs/test_losses_equal_stock.py::test_losses_equal_stock
QUICK := tests/unit tests/parity/mocked/test_gradients_in_mocked_worlds.py tests/parity/gradients/test_context_parallel.py \
	"$(LOSSES)[fp32-1]" "$(LOSSES)[fp32-2]"
# make test draws random inputs that are the same each time; these are new ones, and more of them.
NEW_SEED = $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
NIGHTLY := runs/nightly

# The oldest torch that setup.py takes, and the newest that CI tests; constraints.txt pins one between them, for all else.
TORCH_OLDEST := 2.11.0
TORCH_NEWEST := 2.14.1
# The oldest Megatron-Core in which other launchers can use the overlap.
MEGATRON_OLDEST := 0.18.2
MEGATRON_ENV := $(VENV)/megatron-$(MEGATRON_OLDEST)
MEGATRON_TESTS := tests/parity/library tests/parity/launchers
# Each has an environment of its own beside the pinned one, and Megatron's extensions that torch compiles for it.
TORCH_ENV := $(VENV)-torch-
# The quick tests but those of code without torch and of the repository, and those of the GPU code but the virtual GPU's
# cases and mutants, which take minutes.
WITHOUT_TORCH := $(addprefix tests/unit/,planning schedule report cli benchmarks)
TORCH_TESTS := $(filter-out $(WITHOUT_TORCH),$(patsubst %/.,%,$(wildcard tests/unit/[a-z]*/.))) \
	tests/unit/test_patching.py $(filter-out tests/unit,$(QUICK)) tests/gpu \
	$(filter-out %/test_cases.py %/test_mutants.py,$(wildcard tests/virtual_gpu/test_*.py))

.PHONY: demo test test-quick test-nightly test-benchmarks test-torch test-bridge test-megatron test-gpu check-gpu lint wheel bench-network bench-auto bench-bridge bench-prediction bench-priority bench-evaluation bench-bins bench-causes bench-from-trace bench-gpu flags format constraints clean help

help:
	@echo "make demo    train a small GPT-MoE on real text twice, stock and ours, on a link that is really waited for, and"
	@echo "             show both: three to five minutes; DEMO=long trains a larger one for longer, without comparison"
	@echo "make test    run the test suite"
	@echo "             (PYTEST_ARGS=\"tests/unit/planning -k lowering\": a part of it, in one process)"
	@echo "make test-quick  unit tests and a few comparisons with stock Megatron: at most two minutes on two idle cores"
	@echo "make test-nightly   benchmarks from end to end and long runs, which make test leaves out; and tests that draw their"
	@echo "                    inputs, with new draws and ten times as many: it prints the SEED, SEED=number repeats a run"
	@echo "make test-benchmarks   the demo and the benchmarks, each a few steps long"
	@echo "make test-torch  the quick tests of code with torch, on torch $(TORCH_OLDEST) and $(TORCH_NEWEST), or on VERSION=number; each"
	@echo "                 has an environment of its own, of five gigabytes"
	@echo "make test-bridge     training in Megatron-Bridge's own loop, and Hugging Face weights; Bridge has a folder of its own"
	@echo "make test-megatron   the overlap in other launchers' loops on Megatron-Core $(MEGATRON_OLDEST)"
	@echo "make test-gpu    the tests in tests/gpu on a CUDA device, which no other test sees"
	@echo "make check-gpu   what to run first on a GPU: ten minutes, one page; results in OUT=folder (runs/check-gpu); without"
	@echo "                 network and make: python3 tools/check_gpu.py (docs/gpus.md)"
	@echo "make lint    ruff and mypy"
	@echo "make wheel   build wheel and source distribution, install into an empty environment and run there"
	@echo "make bench-network   what overlap buys on a shaped network (root, Linux): 1 3/4 hours; BENCH_ARGS=--headline:"
	@echo "                     16 minutes, --pairing: 28, --dispatch (fewer bytes): 10, --tiles: 8,"
	@echo "                     --nodes (two hops): 4, --load (experts placed by load): 4, --wired: 3, --quick: 2"
	@echo "make bench-auto      whole trainings: auto, stock, Megatron's overlap and fixed plans in turns (root, Linux): three"
	@echo "                     to six hours; BENCH_ARGS=\"--cases 45-m4\": 10 to 20 minutes"
	@echo "make bench-bridge    stock and pairs in Megatron-Bridge's loop and in Megatron's own (root, Linux): six minutes"
	@echo "make bench-prediction   predicted step times against real ones on the same network (root, Linux): 40 minutes;"
	@echo "                        BENCH_ARGS=--pairing: 15, --tiles: 14, --dispatch: 13, --nodes: 7"
	@echo "make bench-priority     all-to-alls and gradient reductions on one shaped link (root, Linux)"
	@echo "make bench-evaluation   replicas of popular experts on the shaped network (root, Linux)"
	@echo "make bench-bins         documents dealt to bins over all ranks, on the shaped network (root, Linux): 10 minutes"
	@echo "make bench-causes       injected causes of waits, and what is found of them (root, Linux): 8 minutes"
	@echo "make bench-from-trace   profiles from traces of a stock run against our profiler's (root, Linux): 5 minutes"
	@echo "make bench-gpu       stock, pipelined experts and our schedules on one GPU; BENCH_ARGS=--help lists options"

demo: $(STAMP)
	@$(BIN)/python -m benchmarks.demo $(DEMO:%=--%) $(DEMO_ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(or $(PYTEST_ARGS),$(PYTEST_ALL))

test-quick: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not thorough and not nightly" $(QUICK)

test-nightly: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "hypothesis or nightly" --hypothesis-profile nightly --hypothesis-seed $(or $(SEED),$(NEW_SEED)) \
		--timeout 3600 --junitxml $(NIGHTLY)/results.xml --durations 20 $(PYTEST_ARGS)

test-benchmarks: $(STAMP)
	@$(BIN)/python -m pytest $(or $(PYTEST_ARGS),-n 2 --dist loadfile --no-loadscope-reorder -m "not nightly" $(BENCHMARKS))

test-torch: $(addprefix test-torch-,$(or $(VERSION),$(TORCH_OLDEST) $(TORCH_NEWEST)))

test-torch-%: $(TORCH_ENV)%/.installed
	@echo "torch $*"
	@TORCH_EXTENSIONS_DIR="$(abspath $(TORCH_ENV)$*)/extensions" $(TORCH_ENV)$*/bin/python -m pytest -n 2 --dist loadfile \
		--no-loadscope-reorder -m "not slow and not nightly" $(or $(PYTEST_ARGS),$(TORCH_TESTS))

# Megatron-Bridge lies beside the environment: its newest versions of common packages are not the pinned ones.
test-bridge: $(VENV)/bridge/.installed
	@PYTHONPATH="$(abspath $(VENV))/bridge" $(BIN)/python -m pytest $(or $(PYTEST_ARGS),-n 2 --dist loadfile tests/bridge)

$(VENV)/bridge/.installed: $(STAMP) requirements-bridge.txt
	@rm -rf $(VENV)/bridge
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/bridge -r requirements-bridge.txt
	@touch $@

# The environment's packages behind another Megatron-Core.
test-megatron: $(MEGATRON_ENV)/.installed
	@$(MEGATRON_ENV)/bin/python -m pytest $(or $(PYTEST_ARGS),-n 2 --dist loadfile $(MEGATRON_TESTS))

$(MEGATRON_ENV)/.installed: $(STAMP) tools/setup_megatron.sh
	@sh tools/setup_megatron.sh "$(VENV)" "$(MEGATRON_ENV)" "$(MEGATRON_OLDEST)"
	@touch $@

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest tests/gpu

check-gpu: $(STAMP)
	@$(BIN)/python tools/check_gpu.py $(or $(OUT),runs/check-gpu)

lint: $(STAMP)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy

wheel: $(STAMP)
	@sh tools/check_wheel.sh $(BIN)/python

bench-network: $(STAMP)
	@$(BIN)/python -m benchmarks.network $(BENCH_ARGS)

bench-auto: $(STAMP)
	@$(BIN)/python -m benchmarks.auto $(BENCH_ARGS)

bench-bridge: $(VENV)/bridge/.installed
	@$(BIN)/python -m benchmarks.bridge $(BENCH_ARGS)

bench-prediction: $(STAMP)
	@$(BIN)/python -m benchmarks.prediction $(BENCH_ARGS)

bench-priority: $(STAMP)
	@$(BIN)/python -m benchmarks.priority $(BENCH_ARGS)

bench-evaluation: $(STAMP)
	@$(BIN)/python -m benchmarks.evaluation $(BENCH_ARGS)

bench-bins: $(STAMP)
	@$(BIN)/python -m benchmarks.bins $(BENCH_ARGS)

bench-causes: $(STAMP)
	@$(BIN)/python -m benchmarks.causes $(BENCH_ARGS)

bench-from-trace: $(STAMP)
	@$(BIN)/python -m benchmarks.from_trace $(BENCH_ARGS)

bench-gpu: $(STAMP)
	@$(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

# The rows of refused flags in docs/flags.md.
flags: $(STAMP)
	@$(BIN)/python docs/flags_table.py

format: $(STAMP)
	@$(BIN)/ruff check --fix-only $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

# Installed anew only when what is to be installed changes. The environment is complete or has no stamp.
INSTALLED := setup.py constraints.txt requirements-te.txt tools/setup_venv.sh tools/setup_te.sh
$(STAMP): $(INSTALLED)
	@PYTHON="$(PYTHON)" sh tools/setup_venv.sh "$(VENV)"
	@touch $@

$(TORCH_ENV)%/.installed: $(INSTALLED)
	@PYTHON="$(PYTHON)" sh tools/setup_venv.sh "$(TORCH_ENV)$*" "$*"
	@touch $@

.PRECIOUS: $(TORCH_ENV)%/.installed

constraints: $(STAMP)
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(TORCH_ENV)* runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
