#!/usr/bin/env bash
# Everything that needs a GPU: scripts/gpu.sh FOLDER [STEP ...]; each step writes its JSON to FOLDER, and one that fails does not keep the next from running.
# Steps: tests, sanitize (G7), scale (G2, G3, G5), prefill (G5 alone), nvme (G4, G6), identity (G1), gemm (K1 to K5). Without one: all but prefill. NVME: a folder on the disk to measure; COMMIT: of the sources,
# where there is no git to ask.
# Needs python3 (or PYTHON) with torch for CUDA, cuda-bindings, numpy and pytest; the native library is built where there is none.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
out=$(readlink -m "${1:?usage: scripts/gpu.sh FOLDER [STEP ...]}")
shift
steps=("$@")
[ $# -gt 0 ] || steps=(tests sanitize scale nvme identity gemm)
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
ulimit -l unlimited 2>/dev/null || true   # pinned memory
if ! $python -c 'from moet import native; native.lib()' 2>/dev/null; then
  $python setup.py build_ext --inplace >"$out/build.log" 2>&1 || { tail -20 "$out/build.log" >&2; exit 1; }
fi

options=(--out "$out" ${COMMIT:+--commit "$COMMIT"})
failed=()
for step in "${steps[@]}"; do
  echo "gpu: $step" >&2
  case "$step" in
    tests | sanitize) $python benchmarks/gpu/checks.py "$step" "${options[@]}" ;;
    scale) $python benchmarks/gpu/scale.py "${options[@]}" --also-prefill ;;
    prefill) $python benchmarks/gpu/prefill.py "${options[@]}" ;;
    nvme) $python benchmarks/gpu/nvme.py "${options[@]}" ${NVME:+--folder "$NVME"} ;;
    identity) $python benchmarks/gpu/identity.py "${options[@]}" ;;
    gemm) $python benchmarks/moe_gemm.py "${options[@]}" ;;
    *) echo "gpu: unknown step '$step'" >&2; exit 2 ;;
  esac || failed+=("$step")
done
[ ${#failed[@]} -eq 0 ] || { echo "gpu: failed: ${failed[*]}" >&2; exit 1; }
