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
out=$(realpath -m -- "${1:?the folder for results is missing: scripts/gpu_check.sh [--dry] OUT}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 -m scripts.gpu_check "${options[@]}" "$out"
