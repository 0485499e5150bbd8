# The two commands of the README are `make tui` and `make test`; `make setup` is the part they share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup tui test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints-cpu.txt tools/setup.sh
	PYTHON="$(PYTHON)" sh tools/setup.sh "$(VENV)"
	touch $@

tui: setup
	sh tools/tui.sh "$(BIN)"

test: setup
	$(BIN)/python -P -m pytest -n 2 --dist loadgroup -m "not gpu" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info
