# The two commands of the README: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-browser fuzz lint clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/broadsight train scenes:4000 --twin gap

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check broadsight

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --max-worker-restart 0

test-slow: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

# Needs Chromium on the machine, from the system's packages.
test-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev,browser]"
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m browser

# Mutated images, tars, checkpoints, run folders and command lines, so many seconds each; see SECURITY.md.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) $(FUZZ)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
