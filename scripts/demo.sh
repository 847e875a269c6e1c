#!/usr/bin/env bash
# The main job, end to end, on a generated log: profile, plan, compare, check; then a plan for two
# ranks of this machine, a small DLRM trained by it beside TorchRec's own, and a page about each
# plan. Writes into demo/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p demo

bold='' plain=''
if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s$ %s%s\n' "$bold" "$*" "$plain"; "$@"; }

workload=(--topology dgx-a100 --mode training --batch-size 131072)
say oper synth criteo-kaggle -o demo/log.parquet --scale 0.01 --samples 200000 --seed 1 --force
say oper profile demo/log.parquet -o demo/profile --tables demo/log.tables.yaml --force
say oper plan demo/profile "${workload[@]}" -o demo/plan --force
methods=oper,paper,memory_greedy,access_greedy,table_wise,row_wise
say oper compare demo/profile "${workload[@]}" --methods "$methods"
printf '\n$ oper compare … --json > demo/compare.json\n'
oper compare demo/profile "${workload[@]}" --methods "$methods" --json > demo/compare.json
say oper plan check demo/plan demo/log.parquet
say oper plan demo/profile --topology cpu:2 --mode training --batch-size 8192 -o demo/plan-cpu --force
say python examples/train_dlrm.py demo/log.parquet demo/plan-cpu --counters demo/counters.json
say oper report demo/plan --profile demo/profile --compare demo/compare.json \
  -o demo/plan.html --force
say oper report demo/plan-cpu --profile demo/profile --counters demo/counters.json \
  -o demo/plan-cpu.html --force
printf '\nThe plan is in demo/plan. Open demo/plan.html in a browser: it explains the plan.\n'
