"""Models of transformers whose experts this package exchanges, trained and generating text.

`make test-transformers` installs transformers and runs this. The oracles are its own way over Gloo,
`"all_to_all"`, and the same model in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks import clients, transformers_experts
from moe_comm import FP8_BLOCK128, Quantization
from moe_comm.cli.bench.result import to_json
from moe_comm.dispatcher.transformers import balance_experts, register
from moe_comm.tensors.quantized import dequantize, quantize
from moe_comm.testing import RankContext, RankError, run_ranks
from tests.helpers import transformers_models as models
from tests.helpers.source_tree import captured
from tests.helpers.transformers_models import Layout

# FSDP over efsdp in those of 4 ranks with 2 for the experts; EP groups that are a TP group, or several.
LAYOUTS = {
    2: [Layout(2), Layout(2, 2)],
    4: [Layout(4), Layout(2), Layout(2, 2), Layout(4, 2), Layout(4, 4)],
}
FEWER_LAYOUTS = {2: [Layout(2)], 4: [Layout(2), Layout(4, 2)]}
TOLERANCE = 1e-5


# Processes of their own: torch remembers device meshes beyond the process groups that they had.
run_fresh = functools.partial(run_ranks, fresh=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of every model, made when it is asked for."""
    return models.Folders(tmp_path_factory)


def train_and_generate(context: RankContext, checkpoint: str, layouts: list[Layout]) -> list[str]:
    """Differences from the other way and from one process; ranks have batches of different lengths."""
    register()
    models.quiet()
    alone = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    faults = []
    for layout in layouts:
        num_batches = context.num_ranks // layout.tp_size
        batches = [models.batch(idx, 7 + 2 * idx) for idx in range(num_batches)]
        batch_idx = context.rank_idx // layout.tp_size
        found = {
            way: models.step_and_text(
                models.load(checkpoint, way, context, layout), [batches[batch_idx]], batch_idx
            )
            for way in ("all_to_all", "moe_comm")
        }
        alone.zero_grad()
        found["one process"] = models.step_and_text(alone, batches, batch_idx)
        ours = found.pop("moe_comm")
        assert any("experts" in name for name in ours)
        for oracle, expected in found.items():
            if expected.keys() != ours.keys():
                faults.append(f"{layout}: {oracle} differs in {expected.keys() ^ ours.keys()}")
            for name in expected.keys() & ours.keys():
                error = models.relative_error(ours[name], expected[name])
                if not error <= (0 if name == "text" else TOLERANCE):
                    faults.append(f"{layout}: {name} is off {oracle} by {error:.2g}")
    return faults


RUNS = [
    *((name, 2) for name in models.CONFIGS),
    *((name, 4) for name in models.CONFIGS if name != "nemotron_h"),
    # Its recurrent layers take their time in plain torch.
    pytest.param("nemotron_h", 4, marks=pytest.mark.slow),
]


@pytest.mark.client(
    "transformers",
    way="`register()`",
    ran="{name}, {num_ranks} ranks: a step of training and generated text, in every layout",
)
@pytest.mark.parametrize(("name", "num_ranks"), RUNS)
def test_losses_gradients_and_text_are_those_of_all_to_all_and_of_one_process(
    checkpoints: dict[str, str], name: str, num_ranks: int
) -> None:
    layouts = (LAYOUTS if name == "qwen3_moe" else FEWER_LAYOUTS)[num_ranks]
    faults = run_fresh(train_and_generate, num_ranks, checkpoints[name], layouts)
    assert [text for rank in faults for text in rank] == []


def meshes(num_ranks: int, ep_size: int, tp_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Those of experts and of batches, as transformers makes them."""
    ep = init_device_mesh("cpu", (num_ranks // ep_size, ep_size), mesh_dim_names=("efsdp", "ep"))
    tp = init_device_mesh("cpu", (num_ranks // tp_size, tp_size), mesh_dim_names=("fsdp", "tp"))
    return ep["ep"], tp["tp"]


def run_layer(
    way: str,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ep: DeviceMesh,
    tp: DeviceMesh,
) -> dict[str, torch.Tensor]:
    """Output and gradients of one module of experts, all of which have parameters of their own."""
    x, ids, weights = (tensor.clone() for tensor in given)
    experts = MixtralExperts(
        MixtralConfig(
            hidden_size=128,
            intermediate_size=16,
            num_local_experts=8 // ep.size(),
            experts_implementation="grouped_mm",
        )
    ).to(x.dtype)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            every = torch.randn((8, *parameter.shape[1:]), generator=draw) * 0.1
            parameter.copy_(every.chunk(ep.size())[ep.get_local_rank()])
    y = EPImplementationInterface()[way](experts, ep, tp)(
        x.requires_grad_(), ids, weights.requires_grad_()
    ).to(x.dtype)
    y.backward(torch.randn(y.shape, generator=draw).to(y.dtype))
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def compare_layers(
    context: RankContext, dtype: torch.dtype, quantization: Quantization | None
) -> list[str]:
    """A module of experts by both ways; batches of 0 tokens, and of fewer than a TP group has ranks."""
    register(quantization=quantization)
    faults = []
    # The last: EP groups within a TP group.
    for ep_size, tp_size in ((4, 1), (2, 1), (4, 2), (2, 2), (4, 4), (2, 4)):
        ep, tp = meshes(context.num_ranks, ep_size, tp_size)
        batch_idx = context.rank_idx // tp_size
        for num_tokens in (5 + batch_idx, 3 * (batch_idx % 2), 0):
            draw = torch.Generator().manual_seed(batch_idx)
            x = torch.randn(num_tokens, 128, generator=draw).to(dtype)
            ids = torch.rand(num_tokens, 8, generator=draw).topk(2).indices
            weights = torch.rand(num_tokens, 2, generator=draw).to(dtype)
            ours = run_layer("moe_comm", (x, ids, weights), ep, tp)
            if quantization is not None:
                arrived = dequantize(*quantize(x, quantization), quantization, dtype)
                assert num_tokens == 0 or not torch.equal(arrived, x)
                x = arrived
            theirs = run_layer("all_to_all", (x, ids, weights), ep, tp)
            # Sums are rounded once here, and after every term there.
            tolerance = 8 * torch.finfo(dtype).eps
            for name, expected in theirs.items():
                error = models.relative_error(ours[name], expected)
                if not error <= tolerance:
                    what = f"ep{ep_size}.tp{tp_size}, {num_tokens} tokens"
                    faults.append(f"{what}: {name} is off by {error:.2g}")
    return faults


@pytest.mark.client(
    "transformers",
    way="`register()`",
    ran="experts of a model, plain and as FP8",
)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, FP8_BLOCK128)],
    ids=["float32", "bfloat16", "fp8"],
)
def test_experts_compute_what_they_do_with_all_to_all(
    dtype: torch.dtype, quantization: Quantization | None
) -> None:
    faults = run_fresh(compare_layers, 4, dtype, quantization)
    assert [text for rank in faults for text in rank] == []


def train_where_experts_starve(context: RankContext, checkpoint: str) -> list[str]:
    """Ranks whose experts get no row share parameters, by FSDP, with ranks whose experts get some."""
    register()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for way in ("all_to_all", "moe_comm"):
        # Experts in a loop over those with rows: the others have no part in it.
        options = {"experts_implementation": "eager"}
        model = models.load(checkpoint, way, context, Layout(2), **options)
        first_expert = 4 * (context.rank_idx // 2)  # of those of one rank of the group

        def choose(_: Any, __: Any, routing: Any, first: int = first_expert) -> Any:
            logits, weights, ids = routing
            return logits, weights, torch.arange(first, first + ids.shape[1]).expand_as(ids)

        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(choose)
        found[way] = models.step_and_text(model, [models.batch(context.rank_idx, 6)], 0)
    return [
        f"{name} is off by {models.relative_error(found['moe_comm'][name], expected):.2g}"
        for name, expected in found["all_to_all"].items()
        if not models.relative_error(found["moe_comm"][name], expected) <= TOLERANCE
    ]


@pytest.mark.client(
    "transformers",
    way="`register()`",
    ran="experts that get no rows, under FSDP",
)
def test_experts_without_rows_train_with_their_replicas(checkpoints: dict[str, str]) -> None:
    faults = run_fresh(train_where_experts_starve, 4, checkpoints["qwen3_moe"])
    assert [text for rank in faults for text in rank] == []


def train_otherwise(context: RankContext, checkpoint: str, how: str) -> list[str]:
    """Differences where layers are recomputed, or the model compiled."""
    register()
    found = []
    tokens = [models.batch(context.rank_idx, 5 + context.rank_idx)]
    for is_plain in (True, False):
        model = models.load(checkpoint, "moe_comm", context, Layout(2))
        run = model
        if not is_plain and how == "recomputed":
            model.gradient_checkpointing_enable()
        elif not is_plain:
            run = torch.compile(model, backend="aot_eager")
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=how == "traced"):
            found.append(models.step_and_text(model, tokens, 0, run=run))
    plain, other = found
    return [
        f"{name} is off by {models.relative_error(other[name], expected):.2g}"
        for name, expected in plain.items()
        if not models.relative_error(other[name], expected) <= TOLERANCE
    ]


@pytest.mark.client(
    "transformers",
    way="`register()`",
    ran="a model {how}",
)
@pytest.mark.parametrize("how", ["recomputed", "compiled", "traced"])
def test_recomputed_and_compiled_models_learn_the_same(
    checkpoints: dict[str, str], how: str
) -> None:
    faults = run_fresh(train_otherwise, 2, checkpoints["qwen3_moe"], how)
    assert [text for rank in faults for text in rank] == []


def save_what_was_trained(context: RankContext, checkpoint: str, folder: str) -> torch.Tensor:
    register()
    model = models.load(checkpoint, "moe_comm", context, Layout(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    models.step_and_text(model, [models.batch(context.rank_idx, 6)], 0)
    optimizer.step()
    model.save_pretrained(folder)
    logits: torch.Tensor = model(models.batch(9, 5)).logits
    return logits.detach()


@pytest.mark.client(
    "transformers",
    way="`register()`",
    ran="`save_pretrained` after a step",
)
def test_what_was_trained_is_saved_whole(checkpoints: dict[str, str], tmp_path: Path) -> None:
    first = checkpoints["qwen3_moe"]
    logits, _ = run_fresh(save_what_was_trained, 2, first, str(tmp_path))
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(models.batch(9, 5)).logits
        for folder in (first, tmp_path)
    )
    assert models.relative_error(after, logits) <= TOLERANCE
    assert models.relative_error(before, logits) > 100 * TOLERANCE


def whole_numbers(shape: tuple[int, ...], most: int, seed: int) -> torch.Tensor:
    """Few enough, and small enough, for all sums of products to be exact in float32, in any order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=draw).float()


def compare_with_replicas(context: RankContext) -> tuple[list[str], int]:
    """A module of experts with replicas and its twin without, trained on batches that all want few experts.

    Returns:
        What differs in a bit, and how many steps had replicas.
    """
    register()
    ep, tp = meshes(context.num_ranks, context.num_ranks, 1)
    twins = []
    for _ in range(2):
        experts = MixtralExperts(
            MixtralConfig(
                hidden_size=16,
                intermediate_size=8,
                num_local_experts=8 // ep.size(),
                hidden_act="relu",
                experts_implementation="eager",
            )
        )
        with torch.no_grad():
            for parameter in experts.parameters():
                every = whole_numbers((8, *parameter.shape[1:]), 1, 3)
                parameter.copy_(every.chunk(ep.size())[ep.get_local_rank()])
        twins.append((experts, EPImplementationInterface()["moe_comm"](experts, ep, tp)))
    balanced = twins[1]
    balancer = balance_experts(balanced[0], num_steps=2)
    faults, num_with_replicas = [], 0
    for step in range(10):
        num_with_replicas += balanced[0].moe_comm_experts.buffer.config.placement.has_replicas
        num_tokens = (40, 0, 7, 24)[(context.rank_idx + step) % 4]
        draw = torch.Generator().manual_seed(10 * step + context.rank_idx)
        odds = torch.full((max(num_tokens, 1), 8), 0.2)
        odds[:, [step // 5, 5]] = 4.0
        ids = odds.multinomial(2, generator=draw)[:num_tokens]
        found = []
        for experts, layer in twins:
            x = whole_numbers((num_tokens, 16), 3, step).requires_grad_()
            weights = torch.full((num_tokens, 2), 0.5).requires_grad_()
            experts.zero_grad()
            y = layer(x, ids, weights)
            y.backward(whole_numbers(tuple(y.shape), 1, 100 + step))
            if experts is balanced[0]:
                balancer.reduce_gradients()
            grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
            found.append({"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads})
            with torch.no_grad():
                for parameter in experts.parameters():
                    parameter.sub_(parameter.grad.sign()).clamp_(-2, 2)
        expected, ours = found
        faults += [
            f"step {step}: {name}"
            for name, tensor in expected.items()
            if not torch.equal(ours[name], tensor)
        ]
        balancer.step()
    return faults, num_with_replicas


@pytest.mark.client(
    "transformers",
    way="`balance_experts`",
    ran="experts of a model with replicas on {num_ranks} ranks, trained: the same bits as without",
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_with_replicas_have_the_bits_of_those_without(num_ranks: int) -> None:
    for faults, num_with_replicas in run_fresh(compare_with_replicas, num_ranks):
        assert faults == []
        assert num_with_replicas >= 6


def train_balanced(context: RankContext, checkpoint: str, folder: str) -> list[str]:
    """Steps of a model with replicas, as FSDP shards it, and of one by the other way."""
    register()
    states: dict[str, list[dict[str, torch.Tensor]]] = {"all_to_all": [], "moe_comm": []}
    for way, found in states.items():
        model = models.load(checkpoint, way, context, Layout(2))
        balancer = balance_experts(model, 2, num_steps=1) if way == "moe_comm" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):  # gradients are accumulated
                tokens = models.batch(4 * step + 2 * part + context.rank_idx, 9)
                model(input_ids=tokens, labels=tokens).loss.backward()
                if balancer is not None:
                    balancer.reduce_gradients()
            found.append(
                {
                    f"step {step}: {name}": models.whole(parameter.grad)
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
            )
            optimizer.step()
            if balancer is not None:
                balancer.step()
        found.append({"text": models.step_and_text(model, [models.batch(7, 6)], 0)["text"]})
        if balancer is not None:
            placements = [
                layer.mlp.experts.moe_comm_experts.buffer.config.placement
                for layer in model.model.layers
            ]
            assert all(placement.has_replicas for placement in placements)
        model.save_pretrained(f"{folder}/{way}")
    faults = []
    for ours, expected in zip(states["moe_comm"], states["all_to_all"], strict=True):
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            error = models.relative_error(ours[name], tensor)
            if not error <= (0 if name == "text" else 10 * TOLERANCE):
                faults.append(f"{name} is off by {error:.2g}")
    return faults


@pytest.mark.client(
    "transformers",
    way="`balance_experts`",
    ran="a model with replicas under FSDP: steps of training, generated text, `save_pretrained`",
)
def test_models_with_replicas_learn_what_others_do(
    checkpoints: dict[str, str], tmp_path: Path
) -> None:
    faults = run_fresh(train_balanced, 2, checkpoints["qwen3_moe"], str(tmp_path))
    assert [text for rank in faults for text in rank] == []
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / way, dtype=torch.float32).state_dict()
        for way in ("moe_comm", "all_to_all")
    )
    for name, tensor in theirs.items():
        assert models.relative_error(ours[name], tensor) <= 10 * TOLERANCE, name


def balance_what_cannot_be(context: RankContext, checkpoint: str) -> None:
    register()
    with pytest.raises(
        ValueError, match=r"experts of an ep_implementation of register\(\), got none"
    ):
        balance_experts(models.load(checkpoint, "all_to_all", context, Layout(4)))
    model = models.load(checkpoint, "moe_comm", context, Layout(2))
    with pytest.raises(
        ValueError, match=r"must hold 4 experts on this rank, got shape \(2, .*ep_size ="
    ):
        balance_experts(model)
    with pytest.raises(ValueError, match=r"num_spare_slots must be >= 1, got 0"):
        balance_experts(model, 0)
    with pytest.raises(ValueError, match=r"2 spare slots.* rank 0.*3 spare slots.* rank 1"):
        balance_experts(model, 2 + context.rank_idx % 2)


def test_what_cannot_be_balanced_is_refused(checkpoints: dict[str, str]) -> None:
    run_fresh(balance_what_cannot_be, 4, checkpoints["qwen3_moe"])


def load_with_own_options(context: RankContext, checkpoint: str) -> None:
    register(quantization=FP8_BLOCK128 if context.rank_idx else None)
    model = models.load(checkpoint, "moe_comm", context, Layout(2))
    model(models.batch(0, 4))


def test_ranks_with_different_options_are_told(checkpoints: dict[str, str]) -> None:
    met = r"ranks disagree: .* on rank 0 met .*FP8_BLOCK128.* on rank 1"
    with pytest.raises(RankError, match=met) as caught:
        run_fresh(load_with_own_options, 2, checkpoints["qwen3_moe"])
    assert re.search(f"--- rank 1: ValueError.*{met}", str(caught.value))


@pytest.mark.client(
    "transformers",
    way="the example",
    ran="`Trainer`, then `generate()`",
)
def test_the_example_trains_and_generates() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "train_transformers.py"
    sizes = ["--steps", "6", "--hidden", "32", "--context", "32", "--text-bytes", "20000"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = captured([*launcher, "--nproc-per-node", "2", example, *sizes], timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split("│")[1:-1] for line in ended.stdout.splitlines() if line.count("│") == 4]
    assert [way.strip() for way, _, _ in rows] == ["all_to_all", "moe_comm"]
    assert "def __init__(self, " in ended.stdout
    assert "both learn the same" in ended.stdout


def test_the_example_is_started_by_torchrun() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "train_transformers.py"
    ended = captured([sys.executable, example], timeout=200)
    assert ended.returncode != 0
    assert "torchrun --nproc-per-node 2" in ended.stderr


def test_the_benchmark_checks_and_times_both_ways() -> None:
    framework = transformers_experts.FRAMEWORK
    case = dataclasses.replace(
        framework.case, num_ranks=2, num_tokens=24, hidden=64, num_experts=8, num_topk=2
    )
    document = to_json({}, clients.bench(framework, case), {})
    found = {(row["client"], row["op"]): row for row in document["cases"]}
    ops = [f"transformers_{phase}" for phase in ("forward", "backward", "step")]
    ways = (transformers_experts.ORACLE, transformers_experts.CLIENT)
    assert set(found) == {(way, op) for way in ways for op in ops}
    for (way, _), row in found.items():
        assert (row["ranks"], row["tokens"], row["topk"], row["check"]) == (2, 24, 2, "ok")
        is_oracle = way == transformers_experts.ORACLE
        assert set(row["speedup"]) == (set() if is_oracle else {transformers_experts.ORACLE})
        assert row["backend"] == ("gloo" if is_oracle else "host")


def test_the_benchmark_finds_a_wrong_row() -> None:
    expected = {"y": torch.ones(3, 4)}
    clients.check("oracle", "client", expected, {"y": torch.ones(3, 4)})
    wrong = torch.ones(3, 4)
    wrong[1, 2] = 1.1
    with pytest.raises(ValueError, match=r"client: a row of y differs from oracle by 0\.05"):
        clients.check("oracle", "client", expected, {"y": wrong})
