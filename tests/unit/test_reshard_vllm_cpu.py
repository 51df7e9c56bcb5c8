"""Whole versions into `VllmCpuModel`, over a pretended vLLM that serves what it was handed.

The real one is tried by `tests/multiprocess/test_vllm_refit.py`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_comm.errors import RefitError
from moe_comm.resharding import CheckpointView, CheckpointViews, Refit, clear_all_caches
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.intervals import whole
from moe_comm.resharding.engines.vllm_cpu import VllmCpuModel
from moe_comm.resharding.hold import refit_pass
from moe_comm.testing import RankContext
from tests.helpers.threaded_refits import error_of, threads

SHAPE = (4, 6)
NAMES = ["q", "k"]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend the functions of vLLM that are looked up by name."""
    loader = "vllm.model_executor.model_loader"

    def layer_info(module: Any) -> Any:
        return types.SimpleNamespace(restore_metadata=(dict(module._parameters), {}))

    functions: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: True)},
        "vllm.config": {"set_current_vllm_config": lambda _: contextlib.nullcontext()},
        f"{loader}.utils": {"process_weights_after_loading": lambda *_: None},
        f"{loader}.reload.layerwise": {"get_layerwise_info": layer_info},
        f"{loader}.reload.meta": {"SKIP_TENSORS": set()},
        f"{loader}.reload.sanitize": {"restore_layer_refs": lambda tensor, _: tensor},
    }
    for name, members in functions.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    clear_all_caches()
    yield
    clear_all_caches()


class Model(torch.nn.Module):
    """Two matrices of a checkpoint, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            first = 4 * NAMES.index(name)
            self.fused.data[first : first + 4].copy_(tensor)


def engine_of(model: Model) -> VllmCpuModel:
    config: Any = types.SimpleNamespace(
        quant_config=None,
        lora_config=None,
        model_config=None,
        parallel_config=types.SimpleNamespace(enable_eplb=False, world_size_across_dp=1),
    )
    engine = VllmCpuModel(model, config)
    engine.accept({name: torch.empty(SHAPE, device="meta") for name in NAMES})
    return engine


class Pair:
    """A trainer's rank (0) and an engine's (1)."""

    def __init__(self, context: RankContext) -> None:
        self.model = Model()
        self.engine = engine_of(self.model) if context.rank_idx else None
        self.values = [torch.zeros(SHAPE) for _ in NAMES]
        views = [
            CheckpointView(name, SHAPE, tuple(map(whole, SHAPE)), tensor)
            for name, tensor in zip(NAMES, self.values, strict=True)
        ]
        source = None if self.engine else CheckpointViews(views)
        target = CheckpointViews(self.engine.views, self.engine) if self.engine else None
        self.refit = Refit(source, target, "symmetric", context.group, verify="checksum")

    def run(self, value: float) -> str:
        for tensor in self.values:
            tensor.fill_(value)
        return error_of(self.refit.run)

    def hand_over(self, version: str) -> str:
        return error_of(self.engine.moved) or error_of(lambda: self.engine.commit(version))


def test_a_version_is_served_after_each_refit_alone() -> None:
    def rank(context: RankContext) -> None:
        pair = Pair(context)
        if pair.engine:
            assert "no refit has written the 2 tensors" in pair.hand_over("none")
        for step in (1, 2):
            assert pair.run(step) == ""
            if pair.engine:
                assert pair.hand_over(f"step {step}") == ""
                assert bool((pair.model.fused == step).all())
                text = pair.hand_over("twice")
                assert text.startswith("ValueError: no refit has written")
                assert f"(version step {step})" in text
                assert pair.engine.version == f"step {step}"

    threads(rank, 2)


class Fault:
    """Switch of the failure of what was patched."""

    is_on = False


def fail_after_the_copies(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """The target may have been written, and nobody says that it was."""
    real = SymmetricCopyService.run_prepared

    def some(self: Any, prepared: Any) -> None:
        real(self, prepared)
        if fault.is_on:
            raise RuntimeError("the second half did not come")

    monkeypatch.setattr(SymmetricCopyService, "run_prepared", some)


def fail_to_verify(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """An element is overwritten between a refit and its checksums."""
    real = refit_pass.prove_refit

    def spoiled(plan: Any, source: Any, target: Any, *args: Any, **options: Any) -> Any:
        if target is not None and fault.is_on:
            target.views[0].tensor[1, 2] = -1.0
        return real(plan, source, target, *args, **options)

    monkeypatch.setattr(refit_pass, "prove_refit", spoiled)


@pytest.mark.parametrize("fail", [fail_after_the_copies, fail_to_verify])
def test_half_a_version_is_not_handed_over(fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault()
    fail(monkeypatch, fault)

    def rank(context: RankContext) -> str:
        pair = Pair(context)
        texts = []
        for step in (1, 2, 3):
            context.group.all_gather(None)
            fault.is_on = step == 2
            texts.append(pair.run(step))
            if pair.engine is None:
                continue
            refused = pair.hand_over(f"step {step}")
            served = 1 if step == 2 else step
            assert refused.startswith("ValueError: the views are not whole: ") == (step == 2)
            assert pair.engine.version == f"step {served}"
            assert bool((pair.model.fused == served).all())
        assert [bool(text) for text in texts] == [False, True, False]
        return texts[1]

    texts = threads(rank, 2)
    expected = RefitError.__name__ if fail is fail_to_verify else "did not come"
    assert all(expected in text for text in texts), texts


class Experts(torch.nn.Module):
    """The two matrices are experts, found by a map as vLLM's loader finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_map_manager = types.SimpleNamespace(expert_map=torch.tensor([0, 1]))


class MappedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def load_weights(self, weights: Any) -> None:
        places = self.experts.expert_map_manager.expert_map.tolist()
        for name, tensor in weights:
            first = 4 * places[NAMES.index(name)]
            self.fused.data[first : first + 4].copy_(tensor)


def write_in_place(model: MappedModel) -> None:
    model.experts.expert_map_manager.expert_map.copy_(torch.tensor([1, 0]))


def replace_the_map(model: MappedModel) -> None:
    model.experts.expert_map_manager.expert_map = torch.tensor([1, 0])


@pytest.mark.parametrize("move", [write_in_place, replace_the_map])
def test_experts_that_moved_are_refused_by_name(move: Any) -> None:
    expected = (
        "ValueError: experts: its expert map was [0, 1] when VllmCpuModel was made, and is [1, 0]"
    )
    checkpoint = {name: torch.full(SHAPE, float(i)) for i, name in enumerate(NAMES, 1)}
    model = MappedModel()
    engine = engine_of(model)
    engine.load(checkpoint.items())
    engine.commit("first")
    engine.load((name, tensor + 5) for name, tensor in checkpoint.items())
    staged = [view.tensor.clone() for view in engine.views]

    move(model)
    for call in (
        lambda: engine.accept(checkpoint),
        engine.moved,
        lambda: engine.commit("second"),
    ):
        assert error_of(call).startswith(expected)
    assert engine.version == "first"
    assert model.fused[:, 0].tolist() == [1.0] * 4 + [2.0] * 4
    assert all(map(torch.equal, staged, (view.tensor for view in engine.views)))

    anew = engine_of(model)
    anew.load(checkpoint.items())
    anew.commit("second")
    assert model.fused[:, 0].tolist() == [2.0] * 4 + [1.0] * 4
