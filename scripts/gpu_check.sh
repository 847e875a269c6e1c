#!/usr/bin/env bash
# Test and time this checkout on a CUDA device, in under 8 minutes and without a network:
#
#     scripts/gpu_check.sh [--dry] OUT
#
# --dry runs all stages without a device. docs/gpu.md describes the stages and the files in OUT.
set -euo pipefail
options=()
if [ "${1-}" = --dry ]; then
  options=(--dry)
  shift
fi
if [ $# -ne 1 ] || [[ $1 == -* ]]; then
  echo "gpu_check.sh: expected [--dry] OUT, OUT being the folder for results; got: ${*:-nothing}" >&2
  exit 2
fi
out=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 -m scripts.gpu_check "${options[@]}" "$out"
