#!/usr/bin/env bash
# The long runs behind docs/results: scripts/acceptance.sh [STEP ...]; without a step, all of them in order.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
bash scripts/setup.sh .venv --tests
export OMP_NUM_THREADS=1 TRITON_INTERPRET=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python=.venv/bin/python
steps=("$@")
[ $# -gt 0 ] || steps=(tests encode pack read cpu_moe crash identity fidelity chat quality architectures render)
for step in "${steps[@]}"; do
  echo "acceptance: $step" >&2
  case "$step" in
    tests) env -u HF_HUB_OFFLINE $python -m pytest -q -m slow ;;
    encode) $python benchmarks/encode.py ;;
    pack) mkdir -p build && $python benchmarks/pack.py --folder build/pack-source --target /dev/shm/moet-pack ;;
    read) mkdir -p build && $python benchmarks/read_rows.py build/read-rows --json docs/results/read_rows.json ;;
    cpu_moe) $python benchmarks/cpu_moe.py ${GGML:+--ggml "$GGML"} ;;  # GGML: folder with llama.cpp's libggml-*.so (docs/kernels-cpu.md)
    crash | identity | fidelity | chat | quality) $python "benchmarks/acceptance/$step.py" ;;
    schemes) $python benchmarks/schemes/main.py ;;  # minutes on a GPU, hours on two cores: not part of the whole
    architectures) $python scripts/architectures.py ;;
    render) $python scripts/render_results.py ;;
    *) echo "acceptance: unknown step '$step'" >&2; exit 2 ;;
  esac
done
