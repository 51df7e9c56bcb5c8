#!/bin/sh
# Runs the standard cases; see README.md beside this file.
# Usage: benchmarks/run_suite.sh OUT_FOLDER [PEERS]
set -eu
out=${1:?usage: run_suite.sh OUT_FOLDER [PEERS]}
peers=${2-gloo,mpi}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# The clients of another framework live beside this file and are run as a module.
cd "$(dirname "$0")/.."

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

# What the time of a call is made of.
sweep() {
  name=$1
  shift
  moe-comm bench dispatch-combine --sweep --hidden 2048 --json "$out/$name.json" --plot "$out/$name.svg" "$@"
}

sweep sweep_1_rank --ranks 1
sweep sweep_2_ranks --ranks 2

# Each of these takes turns with the plain call on the same input.
bench fp8_2_ranks --ranks 2 --tokens 4096 --quantization fp8_block128
bench fp8_packed_2_ranks --ranks 2 --tokens 4096 --quantization fp8_block128 \
  --scale-format ue8m0 --column-major-scales
bench mxfp8_2_ranks --ranks 2 --tokens 4096 --quantization mxfp8
bench hybrid_ep_2_ranks --ranks 2 --tokens 4096 --api hybrid-ep
for ranks in 2 4 8; do
  bench "low_latency_${ranks}_ranks" --ranks "$ranks" --tokens 8 --hidden 2048 --layout low-latency
done
bench low_latency_fp8_2_ranks --ranks 2 --tokens 8 --hidden 2048 --layout low-latency \
  --quantization fp8_block128

# As if this machine were two nodes.
bench nodes_2x2 --ranks 4 --local-ranks 2 --rail gloo --tokens 2048 --peers collective
bench node_reduction_2x2 --ranks 4 --local-ranks 2 --rail gloo --tokens 2048 --node-reduction
bench nodes_2x2_sockets --ranks 4 --local-ranks 2 --rail sockets --tokens 2048 --peers collective

# Weights from one layout to another, into the heap and outside it; the peer is a service of ours.
reshard() {
  name=$1
  shift
  moe-comm bench reshard --json "$out/$name.json" --plot "$out/$name.png" "$@"
}

reshard reshard_tp2_ep2_to_tp4 --ranks 4 --from tp2.ep2 --to tp4 --bytes 2GiB \
  --destination heap,shared,outside --peers gloo,checksum
reshard reshard_ep4_to_tp2_ep2 --ranks 4 --from ep4 --to tp2.ep2 --bytes 2GiB --peers gloo
reshard reshard_disjoint --source-ranks 2 --destination-ranks 2 --from tp2 --to ep2 --bytes 2GiB \
  --peers gloo
reshard reshard_small_tensors --ranks 4 --tensors 10000 --tensor-bytes 4KiB --peers gloo
reshard reshard_stacked_experts --source-ranks 4 --destination-ranks 1 --from ep4 --to single \
  --experts 128 --stacked-experts --bytes 1GiB --destination heap,shared,outside --peers full-tensors

if python -c 'import megatron.core' 2>/dev/null; then
  python -W ignore -m benchmarks.megatron_flex --ranks 4 --json "$out/megatron_flex.json"
else
  echo "megatron_flex: not run, needs megatron-core (pip install megatron-core)"
fi
if python -c 'import transformers.distributed.expert_parallel' 2>/dev/null; then
  python -W ignore -m benchmarks.transformers_experts --json "$out/transformers_experts.json"
else
  echo "transformers_experts: not run, needs transformers (pip install transformers)"
fi
if python -c 'import vllm' 2>/dev/null; then
  OMP_NUM_THREADS=1 python -W ignore -m benchmarks.vllm_experts --json "$out/vllm_experts.json"
else
  echo "vllm_experts: not run, needs vLLM for CPUs (make test-vllm)"
fi

python -m benchmarks.summary "$out" --pictures "$out"
