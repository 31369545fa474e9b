# make               set up, then build the spine: a model you can chat with, from raw text, plus its evaluations and report
# make all           the whole graph, branches included (JOBS=1: one stage at a time)
# make test          lint, type checks and the most important tests (6 to 20 minutes)
# make test-all      all remaining tests (25 to 50 minutes)
# make serve         start an OpenAI-compatible API and a chat page
# make chat          chat in the terminal
# make report        print the path to the report
# make experiments   what each experiment changed, and its results
# make compare A=main B=workspace    what differs between two runs, why, and whether the difference exceeds chance
# make doctor        check this machine and suggest fixes
# make clients       test the API with five clients, and our scores with three harnesses (docs/clients.md)
# make docs          build the documentation as a site in .work/site
# make update        update all packages in requirements.lock
# make clean         remove the environment and unfinished work, but keep models, data and the DVC cache

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONUNBUFFERED := 1

.PHONY: run all test test-all test-extras check docs setup update serve chat report compare experiments doctor clients clean

run: setup
	@python -m pipeline.run.config
	@python -m pipeline.tools.launch $(if $(JOBS),-j $(JOBS)) spine
	@python -m pipeline.report.card

all: setup
	@python -m pipeline.run.config
	@python -m pipeline.tools.launch $(if $(JOBS),-j $(JOBS))
	@python -m pipeline.report.card

setup: $(READY)

# torch is installed first and pinned: a version range would let pip choose another build of several gigabytes. While .ready is
# up to date, pip does not run. pip spends a third of its time compiling bytecode on one core, so torch is compiled here while pip
# installs the rest, which is then compiled on all cores.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
COMPILE := $(BIN)/python -W ignore -m compileall -qq .venv/lib
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c '$(FITS)' || { echo "expected Python 3.11 to 3.13, the versions that requirements.lock supports, found $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c '$(FITS)' || { echo "expected Python 3.11 to 3.13 in .venv, found $$($(BIN)/python --version); run make clean to remove .venv"; exit 1; }
	$(PIP) --no-compile --constraint requirements.lock torch==2.13.0
	{ $(COMPILE) & $(PIP) --no-compile --requirement requirements.lock; code=$$?; wait; exit $$code; }
	$(COMPILE) -j 0 || :  # some packages contain templates that are not valid Python
	$(PIP) --no-deps --editable .
	touch $(READY)

# Update every package in requirements.lock, except torch, whose build depends on the machine, and the packages its builds install
update:
	test -x .work/lock/bin/uv || { $(PYTHON) -m venv .work/lock && .work/lock/bin/python -m pip install --quiet uv==0.13.9; }
	.work/lock/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade --quiet \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file .work/lock/all.txt
	@head -2 requirements.lock > .work/lock/head.txt
	grep -vE '^(torch|triton|nvidia-|cuda-)' .work/lock/all.txt | cat .work/lock/head.txt - > requirements.lock

check: setup
	ruff format --check .
	ruff check .
	pyright

# One process per core, each with one thread: on tiny models, several threads mostly wait for each other. The tests in a file run
# in the same process, since they share fixtures; tests/conftest.py sets the order of the files.
PYTEST := OMP_NUM_THREADS=1 pytest -n logical --dist loadfile --no-loadscope-reorder

# What a change should pass before it is committed (eight minutes on two cores). `make test-all` runs all the other tests.
test: check
	$(PYTEST) --durations=15 -m "not full and not gpu"

test-all: setup
	$(PYTEST) --durations=15 -m "full and not gpu"

# Tests that are otherwise skipped for lack of a package (trl, onnxruntime-genai, wandb, llama.cpp), in a separate environment.
# pip builds the llama.cpp bindings from source, which takes a C++ compiler and a few minutes.
EXTRAS := .work/extras

test-extras: $(EXTRAS)/.ready
	OMP_NUM_THREADS=1 $(EXTRAS)/bin/python -m pytest -ra -m extra

$(EXTRAS)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,onnx,trackers,parity]' llama-cpp-python
	touch $@

# stage_tasks reads the preferences and labels given on the chat page, so the next `dvc repro` learns from them.
serve: setup
	python -m pipeline.serve --feedback feedback/preferences.jsonl

chat: setup
	python -m pipeline.serve.chat models/deploy

report: setup
	@echo "open reports/index.html"

B ?= workspace

compare: setup
	@test -n "$(A)" || { echo "usage: make compare A=<commit, branch or experiment> [B=<another one; default: workspace>]"; exit 2; }
	@python -m pipeline.report.compare "$(A)" "$(B)"

experiments: setup
	@python -m pipeline.report.compare

docs: setup
	@NO_MKDOCS_2_WARNING=1 mkdocs build --quiet && echo "open .work/site/index.html"

doctor: setup
	@python -m pipeline.tools.doctor

# One environment per client: litellm pins openai below 3, and openai and ai need a newer Node than most systems have
CLIENTS := .work/clients

HARNESSES := lm_eval evalplus bfcl

clients: setup $(CLIENTS)/.ready $(foreach harness,$(HARNESSES),$(CLIENTS)/$(harness)/.ready)
	python -m tests.matrix

# Install only the pinned packages: the harnesses' own requirements include torch. If a harness cannot be installed, its row says so
$(foreach harness,$(HARNESSES),$(CLIENTS)/$(harness)/.ready): $(CLIENTS)/%/.ready: tests/matrix/%.txt
	-$(PYTHON) -m venv --clear $(CLIENTS)/$* && \
		$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $< && touch $@

$(CLIENTS)/.ready: $(addprefix tests/matrix/,package.json node.txt langchain.txt litellm.txt)
	for client in node langchain litellm; do \
		$(PYTHON) -m venv $(CLIENTS)/$$client && \
		$(CLIENTS)/$$client/bin/python -m pip install --quiet --disable-pip-version-check -r tests/matrix/$$client.txt || exit 1; \
	done
	cp tests/matrix/package.json $(CLIENTS)/node/
	PATH="$(CURDIR)/$(CLIENTS)/node/bin:$$PATH" npm install --no-audit --no-fund --prefix $(CLIENTS)/node
	touch $@

clean:
	rm -rf .venv .work/clients .work/*/*/step-* .pytest_cache .hypothesis .ruff_cache *.egg-info
