"""Dispatchers stand on their framework's classes where it can be imported, and alone where not."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path

import pytest

from moe_comm.dispatcher import transformers
from tests.helpers.failing_ranks import PROGRAM_S
from tests.helpers.fresh_python import run_python
from tests.helpers.pages import python_blocks

ROOT = Path(__file__).resolve().parents[2]

SGLANG_BASE = """
import abc, enum
class DispatchOutputFormat(enum.Enum):
    DEEPEP_NORMAL = "deepep_normal"
class CombineInputFormat(enum.Enum):
    DEEPEP_NORMAL = "deepep_normal"
class BaseDispatcher(abc.ABC):
    def __init__(self): self.was_called = True
    @abc.abstractmethod
    def dispatch(self, hidden_states, topk_output): ...
    @abc.abstractmethod
    def combine(self, combine_input): ...
"""
SGLANG_DEEPEP = """
class DeepEPNormalDispatchOutput: ...
class DeepEPLLDispatchOutput: ...
class DeepEPNormalCombineInput: ...
class DeepEPLLCombineInput: ...
"""
VLLM_KERNEL = """
import abc, enum
class FusedMoEActivationFormat(enum.Enum):
    Standard = 1
    BatchedExperts = 2
class ExpertTokensMetadata: ...
class FusedMoEPrepareAndFinalizeModular(abc.ABC):
    @property
    @abc.abstractmethod
    def activation_format(self): ...
    @abc.abstractmethod
    def topk_indices_dtype(self): ...
    @abc.abstractmethod
    def max_num_tokens_per_rank(self): ...
    @abc.abstractmethod
    def num_dispatchers(self): ...
    @abc.abstractmethod
    def output_is_reduced(self): ...
    @abc.abstractmethod
    def prepare(self): ...
    @abc.abstractmethod
    def finalize(self): ...
"""
MODULES = {
    "sglang/srt/layers/moe/token_dispatcher/base": SGLANG_BASE,
    "sglang/srt/layers/moe/token_dispatcher/deepep": SGLANG_DEEPEP,
    "sglang/srt/layers/dp_attention": "def get_is_extend_in_batch(): return True\n",
    "vllm/model_executor/layers/fused_moe/modular_kernel": VLLM_KERNEL,
    "vllm/distributed/device_communicators/base_device_communicator": (
        "class All2AllManagerBase:\n    def __init__(self, cpu_group): raise RuntimeError\n"
    ),
    "vllm/v1/worker/ubatching": "def dbo_current_ubatch_id(): return 7\n",
}

WITH_FRAMEWORKS = """
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.dispatcher import sglang, vllm, vllm_manager
from sglang.srt.layers.moe.token_dispatcher import base, deepep
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
group = RankThreads(1)[0]
dispatcher = sglang.SglangDispatcher(group, 2, num_experts=4, num_max_tokens_per_rank=4)
assert isinstance(dispatcher, base.BaseDispatcher) and dispatcher.was_called
assert dispatcher._resolve_low_latency() is False
assert sglang.DeepEPNormalDispatchOutput is deepep.DeepEPNormalDispatchOutput
manager = vllm_manager.VllmAll2AllManager(group)
assert isinstance(manager, All2AllManagerBase)
shape = vllm.VllmPrepareAndFinalize(manager.get_handle({"num_experts": 4}))
assert isinstance(shape, modular_kernel.FusedMoEPrepareAndFinalizeModular)
assert shape.activation_format is modular_kernel.FusedMoEActivationFormat.Standard
assert vllm.ExpertTokensMetadata is modular_kernel.ExpertTokensMetadata
assert shape._ubatch_id() == 7
"""

WITHOUT_FRAMEWORKS = """
import sys
for name in ("sglang", "vllm", "torchtitan"):
    sys.modules[name] = None
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.dispatcher import sglang, torchtitan, vllm, vllm_manager
assert torchtitan.__all__ == ["DispatchMetadata", "TorchtitanTokenDispatcher", "balance_experts"]
dispatcher = torchtitan.TorchtitanTokenDispatcher.Config(num_experts=4, top_k=2).build()
assert type(dispatcher) is torchtitan.TorchtitanTokenDispatcher
dispatcher.wire_meshes(ep_mesh=None)
import torch
x, ids = torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int64)
rows, counts, metadata = dispatcher.dispatch(x, torch.ones(3, 2), ids, None)
assert torch.equal(dispatcher.combine(rows, metadata, x), 2 * x)
assert sglang.DispatchOutputFormat.DEEPEP_LL.is_deepep_ll()
assert vllm.FusedMoEActivationFormat.Standard
"""


def run(code: str, *folders: Path) -> None:
    first = f"import sys; sys.path[:0] = {[str(folder) for folder in [*folders, ROOT]]}\n"
    ended = run_python("-c", first + code, timeout=PROGRAM_S)
    assert ended.returncode == 0, ended.stderr


def test_where_frameworks_can_be_imported(tmp_path: Path) -> None:
    for name, source in MODULES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    run(WITH_FRAMEWORKS, tmp_path)


def test_where_there_is_none() -> None:
    run(WITHOUT_FRAMEWORKS)


def test_where_a_framework_fails_to_import(tmp_path: Path) -> None:
    for name in ("sglang", "vllm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('no GPU')\n")
    run("import moe_comm.dispatcher.sglang, moe_comm.dispatcher.vllm", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("page", ["dispatcher"])
def test_the_code_of_a_page_runs(page: str) -> None:
    blocks = python_blocks(ROOT / "docs" / f"{page}.md")
    assert len(blocks) == 2
    check = (
        "x = torch.randn(5, 32)\n"
        "ids = torch.tensor([[0, 3]]).expand(5, -1)\n"
        "y = moe(x, ids, torch.full((5, 2), 0.5), lambda rows, offsets: 2 * rows)\n"
        "assert torch.allclose(y, 2 * x)\n"
    )
    run("\n".join([blocks[0], check, blocks[1]]))


def test_transformers_without_a_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = None
    with pytest.raises(ImportError, match=r"transformers 5\.23 or later is needed.* there is none"):
        transformers.register()
    found = "5.22.0"
    for package in ("transformers", "transformers.distributed"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    without = types.ModuleType("transformers.distributed.expert_parallel")
    for module in (None, without):  # earlier versions have no such module, or no registry in it
        monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", module)
        with pytest.raises(ImportError, match=r"5\.23 or later is needed.* there is 5\.22\.0"):
            transformers.register()


@pytest.mark.parametrize(
    ("argument", "value", "found"),
    [("name", None, "None"), ("quantization", "fp8", "str")],
)
def test_transformers_options_of_a_wrong_type_are_refused(
    argument: str, value: object, found: str
) -> None:
    with pytest.raises(TypeError, match=rf"{argument} must be .*got {found}"):
        transformers.register(**{argument: value})  # type: ignore[arg-type]
