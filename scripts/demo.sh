#!/usr/bin/env bash
# The main job, visibly: installs moet, packs demo/model, serves it with a quarter of its experts in RAM, and asks it a question.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
bash scripts/setup.sh .venv
exec .venv/bin/python scripts/demo.py "$@"
