#!/usr/bin/env bash
# Test and time this checkout on a CUDA device, in under 8 minutes and without a network:
#
#     scripts/gpu_check.sh OUT
#
# docs/gpu.md describes the stages and the files in OUT.
set -euo pipefail
out=$(realpath -m "${1:?the folder for results is missing: scripts/gpu_check.sh OUT}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 -m scripts.gpu_check "$out"
