#!/usr/bin/env bash
# Of equal scores torch.topk takes those from two thirds of the row on, or others, by the number of experts: a router
# that is new or rounds its scores sends tokens to other experts than one that takes the first. Linux on x86-64, Python
# 3.11, one process.
#
# One would guess the first ones, as torch.argmax, JAX, NumPy's stable sort and kernels that take one expert after the
# other do; or any, that differ from token to token.
#
#   torch 2.13.0 on a CPU, scores that are all equal (a router of zeros, padding), the same for every token, in every
#   dtype, with sorted=False too:
#       8 experts, 2 of them       5 6
#       64, 6                      41 to 44, 46, 47
#       256, 8                     168 to 175
#       511, 8                     336 to 343, and of 512 experts 0 to 7: from 64 experts for each one chosen
#   Softmax of normal logits in bfloat16, 256 experts, 8 of them: the last one chosen has the score of the first one that
#   is not for 5 % of the tokens, and 2 % get other experts than the first ones of equal score.
#
# So where engines are compared, ties are left out or broken (a bias that grows with the expert), and a router does not
# begin at zero. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
PYTHONPATH="$folder" "$python" - <<'PYTHON'
import torch

EQUAL = {
    (8, 2): [5, 6],
    (64, 6): [41, 42, 43, 44, 46, 47],
    (256, 8): list(range(168, 176)),
    (511, 8): list(range(336, 344)),
    (512, 8): list(range(8)),
}


def first_ones(scores, num_topk):
    """Experts of the largest scores, of equal ones those with the lowest numbers."""
    order = scores.float().sort(dim=-1, descending=True, stable=True)
    is_tied = order.values[:, num_topk - 1] == order.values[:, num_topk]
    return order.indices[:, :num_topk].sort(dim=-1).values, is_tied.float().mean().item()


assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
for (num_experts, num_topk), expected in EQUAL.items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for is_sorted in (True, False):
            found = torch.zeros(5, num_experts, dtype=dtype).topk(num_topk, sorted=is_sorted).indices
            assert found.sort(dim=-1).values.tolist() == [expected] * 5, (num_experts, num_topk, found)
    print(num_experts, num_topk, expected)

torch.manual_seed(0)
scores = torch.randn(4096, 256).softmax(-1).bfloat16()
expected, tied = first_ones(scores, 8)
others = (scores.topk(8).indices.sort(dim=-1).values != expected).any(-1).float().mean().item()
print(f"ties {tied:.1%}, other experts {others:.1%}")
assert 0.03 < tied < 0.07 and 0.01 < others < 0.035, (tied, others)
PYTHON
echo "as described"
