"""The tensors of a module that a refit reads or writes, by name."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe_comm.resharding.tensor_table import TensorTable, any_has, hold_same

__all__ = [
    "ModuleState",
    "get_refit_tensor_dict",
    "invalidate_refit_tensor_cache",
    "local_tensor",
    "module_state",
    "modules_with",
    "named_persistent_buffers",
    "named_refit_tensors",
]

_CACHE_ATTRIBUTE = "_refit_tensor_cache"


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, any other tensor itself; without its gradient history."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def named_persistent_buffers(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Buffers that a state dict would hold: (full name, module that owns it, name there, buffer)."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), owner, name, buffer


def named_refit_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then persistent buffers; one that several modules share comes once."""
    yield from module.named_parameters()
    for name, _, _, buffer in named_persistent_buffers(module):
        yield name, buffer


class ModuleState:
    """The tensors of a module while none of them is replaced, moved or reshaped.

    Args:
        tensors: By name.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._table = TensorTable(list(tensors.values()))

    def is_current(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether `tensors` are these, each at its place."""
        return tensors is self.tensors and self._table.matches(list(tensors.values()))


_NO_TENSORS = ModuleState({})

_CONTENTS = operator.attrgetter("_parameters", "_buffers", "_modules")


class _TensorCache:
    """Tensors by name, and what a module held when they were listed.

    Args:
        module: Not kept: a module that referred to itself would be freed late.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = dict(named_refit_tensors(module))
        self.state: ModuleState | None = None
        self.descendants = [child for path, child in module.named_modules() if path]
        self.dicts: list[dict[str, Any]] = [each.__dict__ for each in self.descendants]
        self.types = {type(each) for each in module.modules()}
        dicts = list(chain.from_iterable(map(_CONTENTS, module.modules())))
        self._keys = list(chain.from_iterable(dicts))
        self._held = list(chain.from_iterable(map(dict.values, dicts)))

    def is_valid(self, module: torch.nn.Module) -> bool:
        """Whether no parameter, buffer or submodule was added, removed or replaced since."""
        return hold_same([module.__dict__, *self.dicts], self._keys, self._held)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or loaded module lists its own tensors when it is first asked.
        return (_no_cache, ())


def _no_cache() -> None:
    return None


def get_refit_tensor_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`named_refit_tensors` as a dict, kept on the module and listed again when it has changed."""
    return _cache_of(module).tensors


def module_state(module: torch.nn.Module | None) -> ModuleState:
    """The tensors of a module and their places: the same object until one of these changes."""
    if module is None:
        return _NO_TENSORS
    cache = _cache_of(module)
    if cache.state is None or not cache.state.is_current(cache.tensors):
        cache.state = ModuleState(cache.tensors)
    return cache.state


def modules_with(
    module: torch.nn.Module, name: str, *, look_again: bool = True
) -> list[torch.nn.Module]:
    """`module` and those in it that have an attribute of their own, or of their class.

    Args:
        module: The outermost.
        name: Of the attribute.
        look_again: See submodules that were replaced since `module` was last looked at.
    """
    known = module.__dict__.get(_CACHE_ATTRIBUTE)
    cache = known if isinstance(known, _TensorCache) and not look_again else _cache_of(module)
    types = {each for each in cache.types if hasattr(each, name)}
    if not types and name not in vars(module) and not any_has(cache.dicts, name):
        return []
    return [
        each for each in (module, *cache.descendants) if type(each) in types or name in vars(each)
    ]


def _cache_of(module: torch.nn.Module) -> _TensorCache:
    cache = module.__dict__.get(_CACHE_ATTRIBUTE)
    if not isinstance(cache, _TensorCache) or not cache.is_valid(module):
        cache = _TensorCache(module)
        module.__dict__[_CACHE_ATTRIBUTE] = cache
    return cache


def invalidate_refit_tensor_cache(module: torch.nn.Module) -> None:
    """Forget the tensors of a module."""
    module.__dict__.pop(_CACHE_ATTRIBUTE, None)
