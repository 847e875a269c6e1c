#!/usr/bin/env bash
# All measurements of benchmarks/README.md at their full sizes, one after the other, on a machine
# with nothing else to do. Tables go to the terminal and to benchmarks/results/NAME.txt, figures to
# benchmarks/results/NAME.json. `benchmarks/run.sh planning/gap …` runs some of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p benchmarks/results

names=("$@")
[ ${#names[@]} -gt 0 ] ||
  names=(planning/{count,translate} runtime/{lookup,training_step,monitor,migration,checkpoint,deltas,marking,serving,shared_memory,rate_limited_nodes}
    planning/{plan,backtracking,replication,links,noise,milp,replan,bags,held_out,default_bar,advice,windows,drift_verdict,constants,gap,simulated_step}
    report/page scheduler/{transmissions,dispatch_times,tier_plans,tier_optima,locality,staleness,slow_links})
for path in "${names[@]}"; do
  name=${path##*/}
  printf '\n\033[1m%s\033[0m\n' "$name"
  save=(--save "benchmarks/results/$name.json")
  case $name in count | translate) save=() ;; esac
  python -m "benchmarks.${path/\//.}" "${save[@]}" | tee "benchmarks/results/$name.txt"
done
