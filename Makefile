# make train | train-moe | train-hybrid | train-pipeline | chat | test | test-fast | test-long | test-ecosystem | kills | faults | fuzz | mutate | lint | bench | docs
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# Two processes share the tests, each with its own pool of ranks. With worksteal, neighbors stay in one process, which
# shares their fixtures, and the last long tests do not all wait for the same process.
TESTS  := -m pytest --numprocesses 2 --dist worksteal --durations 25 --durations-min 5
STAMP  := $(VENV)/.installed
# Other libraries: an environment of their own, which sees the one above and holds what that lacks.
OTHERS := .venv-ecosystem
# The generator of the site reads the source and imports none of it.
DOCS   := .venv-docs

# Each process of a test would compile weft again, and each mutant the whole copy.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train train-moe train-hybrid train-pipeline chat test test-fast test-long test-ecosystem kills faults fuzz mutate lint bench docs

install: $(STAMP)

# pip would compile every file of torch and Transformers. An import compiles only those that it needs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0 numpy
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[train,test]'
	touch $@

train: install
	$(BIN)/weft train configs/stdlib.toml --ranks 2 $(ARGS)

train-moe: install
	$(BIN)/weft train configs/stdlib-moe.toml --ranks 2 $(ARGS)

train-hybrid: install
	$(BIN)/weft train configs/stdlib-hybrid.toml --ranks 2 $(ARGS)
	$(BIN)/weft sample $$(ls -td runs/stdlib-hybrid* | head -1) --prompt "def read(self"

train-pipeline: install
	$(BIN)/weft train configs/stdlib-pipeline.toml --ranks 2 $(ARGS)

chat: install
	$(BIN)/python examples/chat_model.py runs/chat
	$(BIN)/weft train runs/chat/chat.toml --ranks 2 $(ARGS)
	printf 'What is the capital of France?\nTell me the capital of Japan.\n' | $(BIN)/weft chat $$(ls -td runs/chat/runs/chat* | head -1)

test: install lint
	$(BIN)/python $(TESTS) -m 'not long'

test-fast: install lint
	$(BIN)/python $(TESTS) --durations-min 0.5 -m 'not slow and not long'

test-long: install
	$(BIN)/python $(TESTS) -m long --ignore tests/ecosystem

test-ecosystem: install $(OTHERS)/.installed
	WEFT_ECOSYSTEM=1 $(OTHERS)/bin/python $(TESTS) tests/ecosystem

# What it has hides what is above: torchtitan wants some older.
$(OTHERS)/.installed: $(STAMP) requirements-ecosystem.txt
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $(OTHERS)/main.pth
	mv $(OTHERS)/main.pth $(OTHERS)/lib/python*/site-packages/
	$(OTHERS)/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements-ecosystem.txt
	touch $@

kills: install
	WEFT_KILLS=60 $(BIN)/python -m pytest -s tests/train/test_kill.py -k however_often
	WEFT_RESTARTS=40 $(BIN)/python -m pytest -s tests/train/test_memory_copies.py -k however_many

faults: install
	WEFT_FAULTS=1 $(BIN)/python -m pytest -s tests/train/test_faults.py

fuzz: install
	WEFT_FUZZ=1 $(BIN)/python -m pytest tests/fsdp/test_sequences.py

mutate: install
	$(BIN)/python scripts/mutate.py $(ARGS)

lint: install
	$(BIN)/ruff check src tests benchmarks examples scripts
	$(BIN)/ruff format --check src tests benchmarks examples scripts
	$(BIN)/mypy

bench: install
	$(BIN)/weft bench fsdp2 --ranks 2

# Strict: a broken link, a table that does not render or a public name without documentation is an error.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo build/site/index.html

$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@
