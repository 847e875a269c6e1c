#!/usr/bin/env bash
# The main job, end to end, on a generated log: profile, plan, compare, check. Writes into demo/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p demo

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

say oper synth criteo-kaggle -o demo/log.parquet --scale 0.01 --samples 200000 --seed 1
say oper profile demo/log.parquet -o demo/profile --columns 'C*' --dim 16
say oper plan demo/profile --topology dgx-a100 --mode training --batch-size 8192 -o demo/plan
say oper compare demo/profile --topology dgx-a100 --mode training --batch-size 8192 \
  --methods oper,paper,memory_greedy,access_greedy,table_wise,row_wise
say oper plan check demo/plan demo/log.parquet
printf '\nThe plan is in demo/plan: plan.json says what it decided, `oper plan show demo/plan` prints it.\n'
