"""Work of vLLM's plugin before there are ranks; `tests/multiprocess/test_vllm.py` runs vLLM itself."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_comm.dispatcher import vllm_cpu, vllm_plugin
from moe_comm.resharding.clients.vllm_names import register_weight_transfer

FUSED_MOE = "vllm.model_executor.layers.fused_moe"


class Platform:
    """Stands in for what vLLM runs on."""

    def __init__(self, is_cpu: bool) -> None:
        self.is_cpu = lambda: is_cpu

    def get_device_communicator_cls(self) -> str:
        return "vLLM's own"


def with_modules(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Put modules called `vllm.` and their name, dots for double underscores, in the place of vLLM's."""
    for name, attributes in {"vllm": {"__version__": "0.99"}, **modules}.items():
        full = name if name == "vllm" else f"vllm.{name.replace('__', '.')}"
        module = types.ModuleType(full)
        vars(module).update(attributes, __path__=[])
        monkeypatch.setitem(sys.modules, full, module)


def test_the_package_names_it() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    entry = re.search(
        r'^\[project.entry-points."vllm.general_plugins"\]\nmoe_comm = "(.*)"$',
        project,
        re.MULTILINE,
    )
    assert entry[1] == f"{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"


@pytest.mark.parametrize("value", [None, "", "0"])
def test_unasked_it_looks_at_nothing(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("MOE_COMM_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("MOE_COMM_VLLM", value)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    vllm_plugin.register()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """As in a process in which nothing is registered."""
    register_weight_transfer.cache_clear()
    yield
    register_weight_transfer.cache_clear()


def test_a_weight_transfer_is_offered_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_COMM_VLLM", raising=False)
    offered: list[tuple[str, ...]] = []
    factory = types.SimpleNamespace(register_engine=lambda *names: offered.append(names))
    factories = {"WeightTransferEngineFactory": factory, "WeightTransferTrainerFactory": factory}
    with_modules(
        monkeypatch,
        distributed={},
        distributed__weight_transfer={},
        distributed__weight_transfer__factory=factories,
    )
    for _ in range(2):
        vllm_plugin.register()
    assert [names[0] for names in offered] == ["moe_comm", "moe_comm"]
    for _, module, name in offered:
        source = Path(*module.split(".")).with_suffix(".py")
        text = (Path(__file__).resolve().parents[2] / source).read_text()
        assert f"\nclass {name}(" in text


def test_a_release_without_weight_transfer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_COMM_VLLM", raising=False)
    with_modules(
        monkeypatch,
        distributed={},
        distributed__weight_transfer={},
        distributed__weight_transfer__factory={},
    )
    vllm_plugin.register()


def test_cpu_ranks_get_its_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMM_VLLM", "1")
    platform = Platform(is_cpu=True)
    with_modules(monkeypatch, platforms={"current_platform": platform})
    for _ in range(2):
        vllm_plugin.register()
    module, name = platform.get_device_communicator_cls().rsplit(".", 1)
    assert getattr(sys.modules[module], name) is vllm_cpu.VllmCpuCommunicator


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMM_VLLM", "1")
    platform = Platform(is_cpu=False)
    with_modules(monkeypatch, platforms={"current_platform": platform})
    with pytest.raises(NotImplementedError, match="vLLM's CPU platform, this is Platform"):
        vllm_plugin.register()
    assert platform.get_device_communicator_cls() == "vLLM's own"


def releases() -> list[tuple[dict[str, Any], str]]:
    """Modules of a release that lacks something, and what."""
    factory = {"make_moe_prepare_and_finalize_naive_dp_ep": lambda: None}
    utils, runner = "model_executor__layers__fused_moe__all2all_utils", "MoERunner"
    runners = "model_executor__layers__fused_moe__runner__moe_runner"
    return [
        ({utils: {}}, f"{FUSED_MOE}.all2all_utils.{next(iter(factory))}"),
        ({utils: factory, runners: {}}, f"{FUSED_MOE}.runner.moe_runner.{runner}"),
        ({utils: factory, runners: {runner: type(runner, (), {})}}, f"{runner}._select_forward"),
        ({}, f"{FUSED_MOE}.all2all_utils.{next(iter(factory))}"),
    ]


@pytest.mark.parametrize(("modules", "missing"), releases())
def test_a_release_without_what_it_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any], missing: str
) -> None:
    parents = {"model_executor": {}, "model_executor__layers": {}, "config": {}}
    parents |= {f"model_executor__layers__fused_moe{end}": {} for end in ("", "__runner")}
    with_modules(monkeypatch, **parents, **modules)
    with pytest.raises(ImportError, match=rf"needs .*{missing} as vLLM 0\.32 .* none in 0\.99"):
        vllm_cpu._bring_tokens_by(object())  # type: ignore[arg-type]


def test_experts_that_a_balancer_moves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM 0.32 refuses them on CPUs by itself; a release that does not must not get wrong experts."""
    parallel = types.SimpleNamespace(enable_expert_parallel=True, enable_eplb=True)
    config = types.SimpleNamespace(parallel_config=parallel)
    runner = type("MoERunner", (), {"_select_forward": None})
    factory = "make_moe_prepare_and_finalize_naive_dp_ep"
    parents = {"model_executor": {}, "model_executor__layers": {}}
    parents |= {f"model_executor__layers__fused_moe{end}": {} for end in ("", "__runner")}
    with_modules(
        monkeypatch,
        **parents,
        config={"get_current_vllm_config": lambda: config},
        model_executor__layers__fused_moe__all2all_utils={factory: lambda *_: None},
        model_executor__layers__fused_moe__runner__moe_runner={"MoERunner": runner},
    )
    manager = types.SimpleNamespace(get_handle=lambda _: pytest.fail("a buffer was made"))
    vllm_cpu._bring_tokens_by(manager)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"no load balancing of experts \(enable_eplb\)"):
        getattr(sys.modules[f"{FUSED_MOE}.all2all_utils"], factory)(False)
