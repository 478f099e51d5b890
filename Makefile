# Every target does its own set-up; a fresh machine needs Python 3.11 or newer, make and the package index.
#   make test PYTHON=/usr/bin/python3.13       under another Python (its own .venv/py313)
#   make test MARK='not newest_only' ARGS='tests/lowering -x'

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint ruff types format which python setup hooks lock clean

JOBS ?= 2
MARK ?=
ARGS ?=
DEMO_ARGS ?=

# What pip and Python would otherwise take from the user's own settings.
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

# The first candidate that really runs (version managers put commands on the PATH that do not), is new enough, and
# can make virtual environments (Debian splits ensurepip off). It names its environment: 3.11 lives in .venv/py311.
CANDIDATES = $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python \
  $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[1-9].*/bin/python))
PROBE := import sys, venv, ensurepip; v = sys.version_info; v >= (3, 11) or sys.exit("This is Python %d.%d." % v[:2]); \
  print("py%d%d:%s" % (v[0], v[1], sys.executable))
FOUND = $(eval FOUND := $$(shell for p in $(CANDIDATES); do \
  "$$$$p" -I -c '$$(PROBE)' 2>/dev/null </dev/null && break; done))$(FOUND)
# What the Python that was asked for says, such as that a version manager's shim has none behind it.
SAID = $(if $(PYTHON),for p in $(PYTHON); do echo "$$p says:"; \
  "$$p" -I -c '$(PROBE)' 2>&1 >/dev/null </dev/null | grep . | tail -n 5; done >&2;)
VENV = .venv/$(firstword $(subst :, ,$(FOUND)))
BIN = $(VENV)/bin

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | \
	  awk -F'\t' '{ printf "  make %-8s %s\n", $$1, $$2 }'

demo: setup  ## train a byte-level language model on 2 hosts x 4 gpus of virtual devices (a few minutes)
	@JAX_PLATFORMS=cpu XLA_FLAGS="$${XLA_FLAGS:---xla_force_host_platform_device_count=8}" \
	  $(BIN)/python -m collc train --demo $(DEMO_ARGS)
	@echo "next: . $(BIN)/activate; collc list"

test: setup  ## run all tests; MARK= and ARGS= select some
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(MARK),-m '$(MARK)') $(ARGS)

lint: ruff types  ## ruff and pyright, changing nothing

ruff: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

# pyright does not run setup.py: links show it that schedules/ and models/ are collc.schedules and collc.models.
types: setup
	@mkdir -p .venv/typing/collc && for home in schedules models; do \
	  ln -sfn ../../../$$home .venv/typing/collc/$$home; done
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: setup  ## let ruff fix and format what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

hooks: setup  ## run the linters before each git commit
	@$(BIN)/pre-commit install

python:
	@[ -n "$(FOUND)" ] || { echo "No Python for collc: it has to run, be 3.11 or newer, and have the modules venv and" \
	  "ensurepip. Tried: $(CANDIDATES). Install one (on Debian also its python3-venv)," \
	  "or name one: make PYTHON=/path/to/python" >&2; $(SAID) exit 1; }

which: python
	@found=$(FOUND); echo "$${found#*:}"

# The environment carries two stamps: `locked` says from which lock it was filled, `ready` adds the project itself.
# Without the right `locked` it is made anew, so an interrupted install heals itself and what left the lock is gone.
setup: python  ## the virtual environment that the other targets use
	@set -eu; base=$(FOUND); base=$${base#*:}; \
	locked="$(CURDIR) $$("$$base" -c 'import sys; print(sys.version)' | tr -d '\n') $$(cksum <requirements.lock)"; \
	ready="$$locked $$(cat pyproject.toml setup.py | cksum)"; \
	if [ "$$(cat $(VENV)/ready 2>/dev/null)" = "$$ready" ] && $(BIN)/python -c '' 2>/dev/null; then exit 0; fi; \
	rm -f $(VENV)/ready; \
	if [ "$$(cat $(VENV)/locked 2>/dev/null)" != "$$locked" ] || ! $(BIN)/python -c '' 2>/dev/null; then \
	  echo "making $(VENV) with $$base (a minute or two)"; rm -rf $(VENV); \
	  "$$base" -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --no-deps -r requirements.lock; \
	  echo "$$locked" >$(VENV)/locked; \
	fi; \
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	echo "$$ready" >$(VENV)/ready

# One lock for all Pythons and systems. Indexes and their addresses are the installer's business, not the file's.
lock: python  ## write requirements.lock anew from pyproject.toml
	@base=$(FOUND); [ -x .venv/lock/bin/uv ] || \
	  { "$${base#*:}" -m venv --clear .venv/lock && .venv/lock/bin/python -m pip install --quiet uv; }
	@{ echo "# What CI and the Makefile install, for every supported Python. Written by: make lock"; \
	  .venv/lock/bin/uv pip compile --quiet --universal --upgrade --no-config --no-header --no-annotate \
	    --no-emit-index-url --no-emit-find-links --python-version 3.11 --extra dev --extra pods pyproject.toml; \
	} >requirements.lock.new && mv requirements.lock.new requirements.lock

clean:  ## remove environments, caches and build leftovers (not runs/)
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis requirements.lock.new
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
