"""Whole versions of weights into vLLM on CPUs: tokens are those of transformers.

VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m tests.helpers.vllm_refit FOLDER eager|compiled

The engine is in this process. A trainer is in another, which it starts (FOLDER trainer).
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from moe_comm.resharding import CheckpointViews, Refit, transformers_views
from moe_comm.resharding.engines.vllm_cpu import VllmCpuModel
from moe_comm.testing import RankContext
from tests.helpers.copy_services import unregistered_group
from tests.helpers.vllm_servers import NUM_EXPERTS, VOCABULARY, save_model

NUM_TOKENS = 16
NUM_REFITS = 3
LIMIT_S = 60
PROMPTS = [[(7 * idx + 3 * pos) % VOCABULARY for pos in range(2 + 3 * idx)] for idx in range(6)]
ROUTED = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"

Tensors = dict[str, torch.Tensor]


def tokens_of_transformers(model: Qwen3MoeForCausalLM) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


def checkpoints(folder: Path) -> tuple[list[Tensors], list[list[list[int]]]]:
    """Two sets of weights by disk names, and transformers' tokens of each."""
    first = Qwen3MoeForCausalLM.from_pretrained(save_model(folder / "first"), dtype=torch.float32)
    torch.manual_seed(5)
    second = Qwen3MoeForCausalLM(first.config)
    second.save_pretrained(folder / "second")
    tensors = [load_file(folder / name / "model.safetensors") for name in ("first", "second")]
    tokens = [tokens_of_transformers(model.eval()) for model in (first, second)]
    assert tokens[0] != tokens[1]
    return tensors, tokens


def fused(tensors: Tensors) -> Tensors:
    """The same weights with the experts of a layer stacked, as newer checkpoints have them."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: torch.stack([tensors[f"{path}.{e}.{kind}.weight"] for e in range(NUM_EXPERTS)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        stacked[f"{path}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        stacked[f"{path}.down_proj"] = parts["down_proj"]
    return stacked


def check_versions(
    engine: VllmCpuModel, serve: Callable[[], Any], tensors: list[Tensors], tokens: list[Any]
) -> None:
    """The served version changes in `commit` alone, there and back."""
    _, second = tensors
    assert serve() == tokens[0]
    with pytest.raises(ValueError, match="version early: nothing was accepted"):
        engine.commit("early")
    engine.accept(second)
    engine.load(second.items())
    assert serve() == tokens[0]
    engine.commit("two")
    assert serve() == tokens[1]
    assert engine.version == "two"
    with pytest.raises(ValueError, match="no refit has written the 63 tensors"):
        engine.moved()
    with pytest.raises(ValueError, match="has not come"):
        engine.commit("nothing")
    assert serve() == tokens[1]
    engine.load(second.items())
    engine.commit("two again")
    assert serve() == tokens[1]
    stacked = fused(second)
    engine.accept(stacked)
    engine.load(stacked.items())
    engine.commit("stacked")
    assert serve() == tokens[1]


def group_of(folder: Path, rank_idx: int) -> dist.ProcessGroup:
    """The trainer's end (rank 0), which has no default group, or the engine's, which has vLLM's."""
    return unregistered_group(RankContext(rank_idx, 2, None), rank_idx, str(folder / "store"))


def train(folder: Path) -> None:
    """Other weights for every refit; says transformers' tokens of each."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "first", dtype=torch.float32).eval()
    group = group_of(folder, 0)
    refit = Refit(transformers_views(model), None, "symmetric", group, verify="checksum")
    for step in range(NUM_REFITS):
        torch.manual_seed(100 + step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
        refit.run()
        sys.stdout.write(json.dumps(tokens_of_transformers(model)) + "\n")
        sys.stdout.flush()


def check_refits(
    engine: VllmCpuModel, serve: Callable[[], Any], tensors: Tensors, folder: Path
) -> None:
    """The weights of a trainer in another process are served after every refit, and not before its commit."""
    command = [sys.executable, "-m", "tests.helpers.vllm_refit", str(folder), "trainer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            engine.accept(tensors)
            side, group = CheckpointViews(engine.views, engine), group_of(folder, 1)
            refit = Refit(None, side, "symmetric", group, verify="checksum")
            served = serve()
            for step in range(NUM_REFITS):
                refit.run()
                assert serve() == served
                engine.moved()
                engine.commit(f"step {step}")
                before, served = served, serve()
                assert served != before
                assert served == json.loads(trainer.stdout.readline())
            assert trainer.wait(LIMIT_S) == 0
        finally:
            trainer.kill()


def check_buffers(engine: VllmCpuModel, model: torch.nn.Module, tensors: Tensors) -> None:
    """One that a checkpoint has comes with its version; another stays what it is."""
    scale, other = model.scale, model.other
    assert isinstance(scale, torch.Tensor)
    given = tensors | {"scale": torch.tensor([1.0, 2.0])}
    engine.accept(given)
    engine.load(given.items())
    other.fill_(5)
    assert scale.tolist() == [0, 0]
    engine.commit("with a buffer")
    assert model.scale is scale
    assert scale.tolist() == [1, 2]
    assert model.other is other
    assert other.tolist() == [5, 5]
    with pytest.raises(ValueError, match=r"^scale: the loader refuses it"):
        engine.accept(tensors | {"scale": torch.zeros(3)})


def check_failures(
    engine: VllmCpuModel,
    model: torch.nn.Module,
    serve: Callable[[], Any],
    tensors: list[Tensors],
    tokens: list[Any],
) -> None:
    """The version before is served after each of them. Begins with the second, ends with the first."""
    first, _ = tensors
    version = engine.version
    query = "model.layers.0.self_attn.q_proj.weight"
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    odd = {
        r"layers\.0\.self_attn\.qkv_proj\.weight\[0:128, .* no tensor": without(first, query),
        r"layers\.1\..*w13_weight\[3:4, 64:128, .* no tensor": without(first, expert),
        r"more\.weight: the loader refuses it": first | {"model.more.weight": torch.zeros(2)},
        r"q_proj\.weight: the loader refuses it": first | {query: torch.zeros(8, 128)},
        r"up_proj\.weight: the loader refuses it": first | {expert: first[expert].t()},
    }
    for says, tensors_of_it in odd.items():
        with pytest.raises(ValueError, match=says):
            engine.accept(tensors_of_it)
    engine.accept(first)
    engine.load(without(first, query).items())
    with pytest.raises(ValueError, match=f"^{query}: has not come, nor 0 more of 63 tensors"):
        engine.commit("without a query")
    with pytest.raises(ValueError, match=f"^{expert}: comes a second time"):
        engine.load([(expert, first[expert])])
    with pytest.raises(ValueError, match=f"^{query}: torch.bfloat16 of .* torch.float32 of"):
        engine.load([(query, first[query].bfloat16())])
    assert serve() == tokens[1]
    engine.load([(query, first[query])])
    # The second of two layers of experts fails, after everything before it was packed.
    routed = sys.modules[ROUTED].UnquantizedFusedMoEMethod
    packed = routed.process_weights_after_loading
    replace = sys.modules["vllm.model_executor.utils"].replace_parameter
    layers: list[Any] = []
    made: list[Any] = []
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), routed):
            module.made = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
            made.append(module.made)

    def fail(self: Any, layer: Any) -> None:
        layers.append(layer)
        packed(self, layer)
        # Parts of a matrix that attention wants apart.
        replace(layer, "made", torch.ones(1), prefer_copy=True)
        if len(layers) == 2:
            raise MemoryError("no memory for the second layer")

    with (
        mock.patch.object(routed, "process_weights_after_loading", fail),
        pytest.raises(MemoryError, match="second layer"),
    ):
        engine.commit("failed")
    assert engine.version == version
    assert made == [0, 0]
    assert serve() == tokens[1]
    with mock.patch.object(routed, "process_weights_after_loading", fail):
        engine.commit("one")
    assert serve() == tokens[0]
    assert made == [1, 1]
    assert all(layer.made is each for layer, each in zip(layers[2:], made, strict=True))
    # It stays where nothing makes it anew.
    engine.load(first.items())
    engine.commit("one again")
    assert all(layer.made is each for layer, each in zip(layers[2:], made, strict=True))


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def main(folder: Path, *, is_eager: bool) -> None:
    """All of it, in one engine."""
    import vllm

    tensors, tokens = checkpoints(folder)
    llm = vllm.LLM(
        str(folder / "first"),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        enforce_eager=is_eager,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def serve() -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    model, config = worker.model_runner.model, worker.vllm_config
    engine = VllmCpuModel(model, config)
    check_versions(engine, serve, tensors, tokens)
    check_refits(engine, serve, tensors[0], folder)
    engine.accept(tensors[1])
    engine.load(tensors[1].items())
    engine.commit("two")
    check_failures(engine, model, serve, tensors, tokens)
    for name in ("scale", "other"):
        model.register_buffer(name, torch.zeros(2))
    check_buffers(VllmCpuModel(model, config), model, tensors[1])
    assert serve() == tokens[1]
    balanced = copy.copy(config)
    balanced.parallel_config = copy.copy(config.parallel_config)
    balanced.parallel_config.enable_eplb = True
    with pytest.raises(NotImplementedError, match=r"layers\.0\.mlp\..*: an expert load balancer"):
        VllmCpuModel(model, balanced)


if __name__ == "__main__":
    if sys.argv[2] == "trainer":
        train(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), is_eager=sys.argv[2] == "eager")
