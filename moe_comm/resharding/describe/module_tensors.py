"""The tensors of a module that a refit reads or writes, by name, and whether they are still there."""

from __future__ import annotations

import abc
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain, islice, pairwise
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from moe_comm.resharding.describe.tensor_table import HeldObjects, TensorTable, any_has
from moe_comm.resharding.describe.tied_names import local_tensor, memory_of, names_by_memory
from moe_comm.tensors.memory import num_spanned
from moe_comm.tensors.memory_overlap import first_overlap, has_element_twice

__all__ = [
    "ModuleState",
    "RefitSide",
    "TensorDict",
    "TensorSide",
    "get_refit_tensor_dict",
    "invalidate_refit_tensor_cache",
    "local_tensor",
    "module_of",
    "module_state",
    "modules_with",
    "named_persistent_buffers",
    "named_refit_tensors",
    "problem_with_places",
]

_CONTENTS = operator.attrgetter("_parameters", "_buffers", "_modules")
_DTYPE = operator.attrgetter("dtype")
_CUT_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "allreduce",
    "expert_dim",
    "expert_view",
    "shared_embedding",
)


def problem_with_places(named: Mapping[str, torch.Tensor]) -> str | None:
    """Reason why destinations cannot be written together, or None; a tensor under two names is one.

    Args:
        named: Tensors that are written, by name.
    """
    local = list(map(local_tensor, named.values()))
    is_dense = (
        type(each) is torch.Tensor and each.layout is torch.strided and each.is_contiguous()
        for each in local
    )
    if all(is_dense):
        spans = sorted((each.data_ptr(), each.nbytes) for each in local if each.numel())
        if all(start + size <= after for (start, size), (after, _) in pairwise(spans)):
            return None  # as it is nearly always, in a tenth of the time
    by_place: dict[Hashable, tuple[str, torch.Tensor]] = {}
    for (name, each), tensor in zip(named.items(), local, strict=True):
        # Other kinds of tensors need not have a memory of their own.
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
            by_place.setdefault(memory_of(each), (name, tensor))
    written = list(by_place.values())
    for name, tensor in written:
        if has_element_twice(tensor):
            return (
                f"destination parameter {name} has two elements in one place: shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            )
    overlap = first_overlap([tensor for _, tensor in written])
    if overlap is None:
        return None
    (one, name), (other, other_name) = sorted(
        (_bytes_of(tensor), name) for name, tensor in map(written.__getitem__, overlap[:2])
    )
    return (
        f"destination parameters {name} and {other_name} overlap in memory: bytes {list(one)} and "
        f"{list(other)}"
    )


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and behind its last, whatever lies between."""
    start = tensor.data_ptr()
    return start, start + num_spanned(tensor) * tensor.element_size()


def named_persistent_buffers(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Buffers that a state dict would hold: (full name, module that owns it, name there, buffer)."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), owner, name, buffer


def fsdp_modules(module: torch.nn.Module) -> Iterator[Any]:
    """Modules of `fully_shard` in a module. There are none before torch's package of them was imported."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        yield from (each for each in module.modules() if isinstance(each, kind))


def named_refit_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then persistent buffers; one that several modules share comes once.

    Modules of `fully_shard` that still have whole copies of their parameters, as the outermost has after a
    forward without a backward, give them up first: the parts are what is kept and trained, and copies
    may be of another dtype.
    """
    for each in fsdp_modules(module):
        each.reshard()
    yield from module.named_parameters()
    for name, _, _, buffer in named_persistent_buffers(module):
        yield name, buffer


class TensorDict(dict[str, torch.Tensor]):
    """Tensors by name. A class of its own because a plain dict cannot be referred to weakly."""

    __slots__ = ("__weakref__",)


class _Listing:
    """Tensors of a module by name, and what it held when they were listed.

    Refers to modules and tensors weakly. Listings are kept beside modules and not on them, and a
    submodule may refer to its root, as those of FSDP do: a root that its listing kept alive would
    never go.

    Args:
        module: The outermost.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = dict(named_refit_tensors(module))
        self.names = list(named)
        self.tensors = list(map(weakref.ref, named.values()))
        self.has_dtensors = any(
            issubclass(kind, DTensor) for kind in set(map(type, named.values()))
        )
        self.descendants = [weakref.ref(child) for path, child in module.named_modules() if path]
        self.types = {type(each) for each in module.modules()}
        self._state: ModuleState | None = None
        self._table: TensorTable | None = None
        dicts = list(chain.from_iterable(map(_CONTENTS, module.modules())))
        held = [
            None if value is None else weakref.ref(value)
            for value in chain.from_iterable(map(dict.values, dicts))
        ]
        self._held = HeldObjects(list(chain.from_iterable(dicts)), held)
        self._by_name: weakref.ref[TensorDict] | None = None

    def is_valid(self, module: torch.nn.Module) -> bool:
        """Return whether no parameter, buffer or submodule was added, removed or replaced since."""
        return self._held.are_in([module, *self.descendants])

    def by_name(self) -> dict[str, torch.Tensor]:
        """The tensors; the same dict for as long as somebody holds it."""
        known = None if self._by_name is None else self._by_name()
        if known is None:
            known = TensorDict()
            for name, reference in zip(self.names, self.tensors, strict=True):
                tensor = reference()
                assert tensor is not None, f"{name} is gone while its module is listed"
                known[name] = tensor
            self._by_name = weakref.ref(known)
        return known

    def state(self, module: torch.nn.Module) -> ModuleState:
        """The state of `module`, of which this is valid; the same object until it changes."""
        groups = getattr(module, "pg_collection", None)
        is_current = (
            self._state is not None
            and self._table is not None
            and self._table.matches(self.tensors, has_dtensors=self.has_dtensors)
            and bool(self._state.groups == groups)
        )
        if not is_current or self._state is None:
            tensors = self.by_name()
            self._table = TensorTable(list(tensors.values()))
            # The cut of a tensor is not in its shape.
            cuts = list(map(_cut_of, tensors.values()))
            self._state = ModuleState(self.by_name, tensors, cuts, groups)
        return self._state


_listings: weakref.WeakKeyDictionary[torch.nn.Module, _Listing] = weakref.WeakKeyDictionary()


def _cut_of(tensor: torch.Tensor) -> Any:
    """Return the marks of a tensor that say how it is cut; None where it has none."""
    if isinstance(tensor, DTensor):
        return tensor._spec
    attributes = vars(tensor)
    return tuple(map(str, map(attributes.get, _CUT_ATTRIBUTES))) if attributes else None


class ModuleState:
    """State of a module at one moment, its tensors and how they were cut: the key of what was planned for it.

    While `module_state` returns the same object, the very tensors are where they were, and what was
    prepared for them can run again. A state that `is_alike` has other memory, for which the same plan
    holds. Keeps no tensor alive.

    Args:
        by_name: Callable that gives the tensors while the module is in this state; may refer to them weakly.
        tensors: Tensors by name.
        cuts: Further properties, of each tensor, that a plan depends on.
        groups: Groups over which they are cut.
    """

    def __init__(
        self,
        by_name: Callable[[], dict[str, torch.Tensor] | None],
        tensors: Mapping[str, torch.Tensor],
        cuts: list[Any],
        groups: object = None,
    ) -> None:
        self._by_name = by_name
        self.groups = groups
        self._names = list(tensors)
        # Sizes of all tensors in one list of numbers: ten thousand `torch.Size` that live on would
        # set off a full collection of garbage every few refits.
        self._dims = list(map(torch.Tensor.dim, tensors.values()))
        self._sizes = list(chain.from_iterable(map(torch.Tensor.size, tensors.values())))
        self._dtypes = list(map(_DTYPE, tensors.values()))
        self._cuts = cuts
        self.ties = names_by_memory(tensors.items())
        """Names of each tensor that has several."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by name, for a caller that has just got this state from `module_state`."""
        return self._by_name() or {}

    def is_alike(
        self, other: ModuleState, is_transformed: Callable[[str], bool] | None = None
    ) -> bool:
        """Return whether a plan made for one serves the other.

        Args:
            other: State of the module now.
            is_transformed: Whether a transform writes a parameter, whatever the module calls it: those
                do not count. None where there is no transform.
        """
        if self is other:
            return True
        if self.groups != other.groups or self.ties != other.ties:
            return False
        mine = self._names, self._dims, self._sizes, self._dtypes, self._cuts
        theirs = other._names, other._dims, other._sizes, other._dtypes, other._cuts
        if mine == theirs:
            return True
        if is_transformed is None:
            return False
        return self._without(is_transformed) == other._without(is_transformed)

    def _without(self, is_transformed: Callable[[str], bool]) -> list[tuple[Any, ...]]:
        sizes = iter(self._sizes)
        shapes = [tuple(islice(sizes, dim)) for dim in self._dims]
        return [
            item
            for item in zip(self._names, shapes, self._dtypes, self._cuts, strict=True)
            if not is_transformed(item[0])
        ]


class TensorSide(abc.ABC):
    """A side of a refit whose tensors are named by something else than a module."""

    module: torch.nn.Module
    """Module whose weights these are: it carries marks, and has caches to refresh."""

    @abc.abstractmethod
    def state(self) -> ModuleState:
        """Return the state: the same object until a tensor is replaced, moved, reshaped or cut anew."""


RefitSide: TypeAlias = "torch.nn.Module | TensorSide"

_NO_MODULE = ModuleState(dict, {}, [])


def module_of(side: RefitSide) -> torch.nn.Module:
    """The module whose weights a side of a refit has."""
    return side.module if isinstance(side, TensorSide) else side


def _listing_of(module: torch.nn.Module) -> _Listing:
    listing = _listings.get(module)
    if listing is None or not listing.is_valid(module):
        listing = _listings[module] = _Listing(module)
    return listing


def get_refit_tensor_dict(side: RefitSide) -> dict[str, torch.Tensor]:
    """`named_refit_tensors` as a dict. They are listed again when the module has changed."""
    if isinstance(side, TensorSide):
        return side.state().tensors
    return _listing_of(side).by_name()


def module_state(side: RefitSide | None) -> ModuleState:
    """Return the state of a side: the same object until a tensor is replaced, moved, reshaped or cut anew."""
    if side is None:
        return _NO_MODULE
    if isinstance(side, TensorSide):
        return side.state()
    return _listing_of(side).state(side)


def modules_with(side: RefitSide, name: str, *, look_again: bool = True) -> list[torch.nn.Module]:
    """The module of a side, and those in it, that have an attribute of their own, or of their class.

    Args:
        side: The outermost module, or a side that has it.
        name: Name of the attribute.
        look_again: Whether to see submodules that were replaced since the module was last looked at.
    """
    module = module_of(side)
    known = None if look_again else _listings.get(module)
    listing = _listing_of(module) if known is None else known
    types = {each for each in listing.types if hasattr(each, name)}
    if not types and name not in vars(module) and not any_has(listing.descendants, name):
        return []
    descendants = (reference() for reference in listing.descendants)
    return [
        each
        for each in (module, *descendants)
        if each is not None and (type(each) in types or name in vars(each))
    ]


def invalidate_refit_tensor_cache(module: torch.nn.Module) -> None:
    """Forget the tensors of a module."""
    _listings.pop(module, None)
