# Every target works on a fresh machine and may be repeated. The plain commands stand in README.md.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STATE ?= state-demo

MINUTES ?= 10

.PHONY: demo test test-all lint lock bench proof soak clean

demo: $(VENV)/.installed
	test ! -e $(STATE) || mv $(STATE) $(STATE).$$(date +%s)
	$(BIN)/python lab.py --state-dir $(STATE)
	$(BIN)/python lab.py --state-dir $(STATE) --execute
	@echo; echo "And now with a crash: the server dies after its commit, before its answer."
	-$(BIN)/python lab.py --state-dir $(STATE) --run crash-001 --execute --fault server-after-commit
	$(BIN)/python lab.py --state-dir $(STATE) --run crash-001
	@echo; echo "The world's own rows, one for each run:"
	@$(BIN)/python -c "import sqlite3; [print(*row) for row in sqlite3.connect('$(STATE)/tickets.sqlite').execute('select id, op, payload from tickets')]"

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto -m ""

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

lock: $(VENV)/.installed
	$(BIN)/pip freeze --exclude miniharness

# PEERS=dbos,langgraph,restate,temporal (proof also: all) adds other engines, each in an environment of its own in .peers
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks --peers "$(PEERS)"

proof: $(VENV)/.installed
	$(BIN)/python -m proofs --peers "$(or $(PEERS),none)"

soak: $(VENV)/.installed
	$(BIN)/python -m proofs.soak --minutes $(MINUTES)

clean:
	rm -rf $(VENV) $(STATE)* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
