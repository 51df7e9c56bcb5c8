"""Maps by which an engine's loader finds where an expert lies, and that change while its tensors stay."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_SGLANG = "sglang.srt.eplb.expert_location"


class MovedMap(NamedTuple):
    """A map that is another one than it was.

    Args:
        path: Path of the layer, or name of what has the map.
        then: Map as it was; None where no expert lay elsewhere.
        now: Map as it is.
        is_followed: Whether the engine's loader goes by it. vLLM's keeps the placement that it began with when
            a load balancer (EPLB) moves experts.
    """

    path: str
    then: object
    now: object
    is_followed: bool


class ExpertMaps:
    """The maps of an engine's model, as they are now: of vLLM's layers, and SGLang's, which is one for all.

    Args:
        model: Model whose layers are looked through, once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._readers: list[tuple[str, bool, Callable[[], Any]]] = []
        for path, module in model.named_modules():
            if hasattr(module, "expert_map_manager"):
                self._readers.append((path, True, functools.partial(_map_of_loader, module)))
            if hasattr(getattr(module, "router", None), "eplb_state"):
                self._readers.append((path, False, functools.partial(_map_of_balancer, module)))
        if _SGLANG in sys.modules:
            self._readers.append(("SGLang's ExpertLocationMetadata", True, _map_of_sglang))
        self._then = [_kept(read()) for _, _, read in self._readers]

    def moved(self) -> MovedMap | None:
        """The first map that has changed since this object was made."""
        for (path, is_followed, read), then in zip(self._readers, self._then, strict=True):
            now = read()
            if now is not then and (now is None or then is None or not _equal(then, now)):
                return MovedMap(path, _shown(then), _shown(now), is_followed)
        return None


def _map_of_loader(layer: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = layer.expert_map_manager.expert_map
    return found


def _map_of_balancer(layer: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(layer.router.eplb_state, "logical_to_physical_map", None)
    return found


def _map_of_sglang() -> torch.Tensor | None:
    metadata = sys.modules[_SGLANG].get_global_expert_location_metadata()
    return None if metadata is None else metadata.physical_to_logical_map_cpu


def _kept(table: torch.Tensor | None) -> torch.Tensor | None:
    return None if table is None else table.clone()


def _equal(then: torch.Tensor, now: torch.Tensor) -> bool:
    return then.shape == now.shape and torch.equal(then, now.to(then.device))


def _shown(table: torch.Tensor | None) -> object:
    return None if table is None else table.tolist()
