#!/usr/bin/env bash
# The measurements of benchmarks/README.md, one after the other. Tables go to the terminal and to
# benchmarks/results/NAME.txt, JSON objects to benchmarks/results/NAME.json.
#   benchmarks/run.sh                 all at their full sizes, on a machine with nothing else to do
#   benchmarks/run.sh planning/gap …  some of them
#   benchmarks/run.sh timed           timings of README.md and docs/results.md: 2 quiet cores, 25 min
#   benchmarks/run.sh predicted       other figures of these pages: a machine of any load, an hour
# The last two write docs/figures.json and the pages. To try them: benchmarks/run.sh timed FILE
# --scale 0.001 writes FILE alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p benchmarks/results

# run PATH [ARGUMENT …]: one script.
run() {
  local path=$1 name=${1##*/}
  printf '\n\033[1m%s\033[0m\n' "$*"
  python -m "benchmarks.${path/\//.}" --save "benchmarks/results/$name.json" "${@:2}" | tee "benchmarks/results/$name.txt"
}

# keep PATH [ARGUMENT …]: one script, whose figures are kept.
keep() { run "$@" --figures "$figures" "${trial[@]}"; }

choice=${1:-} figures=${2:-docs/figures.json} trial=("${@:3}")
case $choice in
  timed)
    kaggle=(kaggle-training kaggle-inference kaggle-training-default kaggle-inference-default)
    keep planning/plan "${kaggle[@]}"
    keep runtime/lookup rows
    keep runtime/training_step step lookup --rounds 4
    keep runtime/training_step bags --scale 0.02 --rounds 4 --world-sizes 2
    keep runtime/training_step dlrm --rounds 2 --world-sizes 2
    keep planning/plan syn-large
    ;;
  predicted)
    keep planning/criteo_log
    keep planning/replication criteo-kaggle criteo-80k
    keep planning/links criteo-kaggle criteo-80k
    keep planning/gap criteo-80k diginetica nowplaying retailrocket tmall yoochoose1_64
    keep planning/held_out
    ;;
  *)
    names=("$@")
    [ ${#names[@]} -gt 0 ] ||
      names=(planning/{count,translate} runtime/{lookup,training_step,monitor,migration,checkpoint,deltas,marking,serving,shared_memory,rate_limited_nodes}
        planning/{plan,backtracking,replication,links,noise,milp,replan,bags,held_out,criteo_log,default_bar,advice,windows,drift_verdict,constants,gap,simulated_step}
        report/page scheduler/{transmissions,dispatch_times,tier_plans,tier_optima,locality,staleness,slow_links})
    for path in "${names[@]}"; do run "$path"; done
    exit
    ;;
esac
[ "$figures" != docs/figures.json ] || python -m benchmarks.figures
