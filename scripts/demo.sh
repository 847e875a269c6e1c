#!/usr/bin/env bash
# The main job, end to end, on a generated log: profile, plan, compare, check; then a plan for two
# ranks of this machine, a small DLRM trained with it and with TorchRec's own plan, from the same
# values on the same batches, and a page about each plan. Writes into demo/.
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
cat <<'END'

Done. Open in a browser:
  demo/plan.html      the plan for 8 GPUs: memory, time, proof, and other methods
  demo/plan-cpu.html  the plan that the DLRM was trained with: predicted and counted traffic

Try next (after `source .venv/bin/activate`):
  oper plan show demo/plan                      each rank, each table, and reasons
  oper plan demo/profile --topology 2x4-a100 --batch-size 131072 -o demo/plan-of-2-nodes
  oper profile YOUR_LOG -o profile              your own log; docs/tour.md goes on from here
  python examples/train_dlrm.py --help          the training script
END
