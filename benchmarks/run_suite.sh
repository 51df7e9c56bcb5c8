#!/bin/sh
# Runs the standard cases; see README.md beside this file.
# Usage: benchmarks/run_suite.sh OUT_FOLDER [PEERS]
set -eu
out=${1:?usage: run_suite.sh OUT_FOLDER [PEERS]}
peers=${2-gloo,mpi}
mkdir -p "$out"

bench() {
  name=$1
  shift
  moe-comm bench dispatch-combine --json "$out/$name.json" --plot "$out/$name.png" "$@"
}

bench train_2_ranks --ranks 2 --tokens 4096 --peers "$peers"
bench train_4_ranks --ranks 4 --tokens 2048 --peers "$peers"
# One peer at a time: each needs three windows of rows a rank beside ours.
for peer in $(echo "$peers" | tr , ' '); do
  bench "train_8_ranks_$peer" --ranks 8 --tokens 2048 --peers "$peer"
done
bench decode_2_ranks --ranks 2 --tokens 8 --hidden 2048 --peers "$peers"
bench decode_4_ranks --ranks 4 --tokens 8 --hidden 2048 --peers "$peers"
bench decode_8_ranks --ranks 8 --tokens 8 --hidden 2048 --peers "$peers"
