#!/usr/bin/env bash
# What only a CUDA device can tell of this checkout, in under 8 minutes and without a network:
#
#     scripts/gpu_check.sh OUT
#
# OUT/records.jsonl has a line for each result, as they come; OUT/report.md is written at the end,
# and OUT/log.txt has what the stages printed.
set -euo pipefail
out=$(realpath -m "${1:?the folder for results is missing: scripts/gpu_check.sh OUT}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 -m scripts.gpu_check "$out"
