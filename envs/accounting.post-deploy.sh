#!/usr/bin/env bash
# Runs inside the new environment, in the folder that Snakemake was started in.
set -euo pipefail
pip install --no-deps --no-build-isolation -e .
