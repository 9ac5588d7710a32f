#!/usr/bin/env bash
# Sets everything up in .venv and runs the tests: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
bash scripts/setup.sh .venv --tests
# One OpenMP thread: on few cores the tests' processes would only fight for them.
export OMP_NUM_THREADS=1 TRITON_INTERPRET=1 VLLM_NO_USAGE_STATS=1
if [ $# -eq 0 ]; then set -- -m "not slow"; fi
exec .venv/bin/python -m pytest -q "$@"
