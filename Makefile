# Every target works from a fresh clone: what it needs is installed into .venv first.
PYTHON ?= python3
CORES ?= all
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SNAKEMAKE := $(BIN)/snakemake --cores $(CORES) --workflow-profile workflows/profiles/default
CONFIGURATIONS := smoke default paper

# The rules call `dprc` and `python`; the pip configuration of the machine is left alone.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup results smoke test test-all lint docs dist paper-dry-run report

setup: $(STAMP)

$(STAMP): envs/requirements.lock envs/requirements-data.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet pip==26.3
	$(BIN)/python -m pip install --quiet -r envs/requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -r envs/requirements-data.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

results: $(STAMP)
	$(SNAKEMAKE) results/all

smoke: $(STAMP)
	$(SNAKEMAKE) --configfile workflows/config/smoke.yaml -- results/all

test: $(STAMP)
	$(BIN)/pytest

test-all: $(STAMP)
	$(BIN)/pytest -m "not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflows
	set -e; for name in $(CONFIGURATIONS); do $(BIN)/snakemake --configfile workflows/config/$$name.yaml --lint; done

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

# setuptools would pack again what an earlier build wrote into dprc.egg-info.
dist: $(STAMP)
	rm -rf dist build dprc.egg-info
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_dist.py dist

paper-dry-run: $(STAMP)
	$(SNAKEMAKE) --configfile workflows/config/paper.yaml --dry-run --quiet rules -- results/all
	$(BIN)/python -m workflows.gpu_hours workflows/config/paper.yaml

report: results
	$(SNAKEMAKE) --report results/report.html -- results/all
