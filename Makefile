# make check                      judge solution and torch against the specification
# make check IMPL=path/to/mine.py judge yours
# make test                       rig tests, the specification on solution, impostors: everything
# make demo                       train on real text in eleven ways; outputs/demo/index.html shows them
# make lint | bench | clean       what the names say
#
# Each works as the first command on a fresh clone with nothing but Python, pip and make: the
# environment (.venv) is built when there is none, and brought up to date when pyproject.toml changed.
#
# PYTHON=python3.12   another interpreter for .venv (3.11 or newer)
# PIP_ARGS=...        for pip install, e.g. --extra-index-url https://download.pytorch.org/whl/cpu
# JOBS=2              how many cases make check judges side by side; 0: one by one, in this process
# ARGS=...            for the command itself, e.g. make check ARGS="--clause 'ddp.*' --level production"

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -u -m pip --disable-pip-version-check install --progress-bar off $(PIP_ARGS)
IMPL ?=
ARGS ?=
JOBS ?= 2
BENCH ?= rig ddp attention

# Two threads per rank on two cores make a small step twenty times slower: one each, always.
export OMP_NUM_THREADS := 1
# Hundreds of processes import the same files: compiling them each time is a tenth of make test.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: check test demo lint bench clean env env-dev
.DEFAULT_GOAL := check

check: env
	$(PY) -m spec_tests $(if $(IMPL),--impl "$(IMPL)",--impl solution --impl torch) -n $(JOBS) --report outputs/report $(ARGS)

test: env
	$(PY) -m pytest $(ARGS)

demo: env
	$(PY) -m solution.demo $(ARGS)

lint: env-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: env
	for name in $(BENCH); do $(PY) -m spec_tests.bench $$name $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

env: $(VENV)/.stamp-test
env-dev: env $(VENV)/.stamp-dev

# A line for each file that pip fetches, and one for the unpacking: torch alone takes minutes. A pipe
# would forget pip's exit status, so that travels through it. (awk and sed may wait for a full buffer.)
STATUS := echo "exit $$?"
SHOWN := while read -r word rest; do case "$$word $$rest" in \
    exit*) exit $$rest ;; \
    *.metadata*) ;; \
    "Downloading "*|"Using cached "*|"Processing "*.whl*) echo "  $${rest\#\#*/}" ;; \
    "Installing collected packages: "*) echo "  unpacking $${rest\#*: }" ;; \
  esac; done >&2

# A stamp is touched last, so an interrupted build is taken up again.
$(VENV)/.stamp-test: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	@echo "building $(VENV): torch and the test tools, some minutes the first time" >&2
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@{ $(PIP) -e '.[test,triton]'; $(STATUS); } | $(SHOWN) || \
	  { echo "notice: Triton did not install here; its clauses will report 'not here'" >&2; \
	    { $(PIP) -e '.[test]'; $(STATUS); } | $(SHOWN); }
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-test
	@echo "adding to $(VENV): what make lint needs" >&2
	@{ $(PIP) -e '.[test,dev]'; $(STATUS); } | $(SHOWN)
	@touch $@
