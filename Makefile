# The two commands of the README: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST ?= .venv-oldest
LOCKING ?= .venv-lock
PARALLEL := --numprocesses 2 --dist loadscope --no-loadscope-reorder --max-worker-restart 0
COMPILE := UV_CUSTOM_COMPILE_COMMAND="make lock" $(LOCKING)/bin/uv pip compile pyproject.toml --quiet --universal \
	--python-version 3.10 --upgrade --no-annotate --no-emit-index-url --no-emit-find-links
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-slow test-browser test-oldest fuzz lint lock dev-locked clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --editable ".[all]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python $(PIP) --editable ".[all,dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/broadsight train scenes:4000 --twin gap

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check broadsight

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

# Needs Chromium on the machine, from the system's packages.
test-browser: $(VENV)/.installed-dev
	$(BIN)/python $(PIP) --editable ".[all,dev,browser]"
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m browser

# Mutated images, tars, checkpoints, run folders and command lines, so many seconds each; see SECURITY.md.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) $(FUZZ)

# The oldest versions that pyproject.toml allows, in an environment of their own. Python 3.10 to 3.12 have them.
$(OLDEST)/.installed: requirements/oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP) --no-deps --requirement requirements/oldest.txt
	$(OLDEST)/bin/python $(PIP) --no-deps --editable .
	$(OLDEST)/bin/python -m pip check
	touch $@

test-oldest: $(OLDEST)/.installed
	HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest $(PARALLEL)

# Writes both lists in requirements/ from pyproject.toml: the oldest versions, and the newest with their hashes.
$(LOCKING)/bin/uv:
	$(PYTHON) -m venv $(LOCKING)
	$(LOCKING)/bin/python $(PIP) uv

lock: $(LOCKING)/bin/uv
	$(COMPILE) --resolution lowest-direct --extra test --extra data --output-file requirements/oldest.txt
	$(COMPILE) --generate-hashes --extra all --extra dev --output-file requirements/dev.lock

# The development environment as it was locked, each file checked against its hash.
dev-locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --no-deps --require-hashes --requirement requirements/dev.lock
	$(BIN)/python $(PIP) --no-deps --editable .
	$(BIN)/python -m pip check
	touch $(VENV)/.installed $(VENV)/.installed-dev

clean:
	rm -rf $(VENV) $(OLDEST) $(LOCKING) .pytest_cache .ruff_cache
