"""A rank's tensors under the names and shapes that a conversion gives them, as views of its storage."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Interval, Intervals
from moe_comm.resharding.describe.mesh_layouts import mesh_intervals, ranks_of_mesh, read_mesh
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.describe.no_collection import no_collection
from moe_comm.resharding.describe.tensor_layout import Shape, split

_aten = torch.ops.aten


def converted_views(
    tensors: Mapping[str, torch.Tensor],
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> list[CheckpointView]:
    """Run a conversion over where elements are, and return what this rank holds of what comes out.

    `convert` gets tensors without memory, as whole as the DTensors are whose parts the rank holds, and
    may do to them what leaves elements as they are: slice, split, transpose, reshape, concatenate, stack.
    No weight is read.

    Args:
        tensors: Tensors by name: plain ones, each whole, and DTensors, of which the rank holds its part.
        convert: Conversion of a model's tensors into those of its checkpoint, both by name.

    Returns:
        Views of the storages of `tensors`. None of a tensor of which the rank holds nothing; several of
        one that has been put together, or that is cut where its finer dimensions are not.

    Raises:
        PlanError: Elements come out changed, or not as rectangles; a DTensor has a pending sum, or a
            placement that is not known.
    """
    with no_collection():
        return _converted_views(tensors, convert)


def _converted_views(
    tensors: Mapping[str, torch.Tensor],
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> list[CheckpointView]:
    known: dict[Any, tuple[Intervals, ...] | None] = {}
    given = {name: _IndexTensor.of_storage(name, tensor, known) for name, tensor in tensors.items()}
    views = []
    for name, tensor in convert(dict(given)).items():
        if not isinstance(tensor, _IndexTensor):
            raise PlanError(f"{name}: comes out of the conversion with elements that no rank holds")
        disk_shape = None
        if any(len(each) > 1 for each in tensor.factors):  # of which those of 1 say nothing
            disk_shape = tuple(tensor.shape)
            tensor = _view(tensor, [size for size in tensor.flat() if size > 1])
        shape = tensor.flat()
        views += [
            CheckpointView(name, shape, part.dims, part.view, disk_shape) for part in tensor.parts
        ]
    return views


class _Part(NamedTuple):
    """Elements that a rank holds: the product of intervals of a tensor's factors, and where they are."""

    dims: tuple[Intervals, ...]
    view: torch.Tensor


class _IndexTensor(torch.Tensor):
    """A whole tensor without memory that knows which of its elements a rank holds, and where.

    A dimension is a product of factors, the outermost first: what a view of several strides needs.
    """

    label: str
    factors: tuple[Shape, ...]
    parts: Sequence[_Part]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(
        like: torch.Tensor, label: str, factors: tuple[Shape, ...], parts: Sequence[_Part]
    ) -> _IndexTensor:
        """Return one of the dtype of `like`; `parts` have a dimension for every factor."""
        made: _IndexTensor = torch.Tensor._make_wrapper_subclass(
            _IndexTensor,
            [each[0] if len(each) == 1 else intervals.num_elements(each) for each in factors],
            dtype=like.dtype,
            device=torch.device("meta"),
        )
        made.label, made.factors, made.parts = label, factors, parts
        return made

    @staticmethod
    def of_storage(
        label: str, tensor: torch.Tensor, known: dict[Any, tuple[Intervals, ...] | None]
    ) -> _IndexTensor:
        """Return the whole of a DTensor, or of a plain tensor that is whole.

        Args:
            label: Name of the tensor, for messages.
            tensor: Plain tensor or DTensor.
            known: Indices that the rank holds of DTensors that are cut alike; is added to.
        """
        local = local_tensor(tensor)
        dims: tuple[Intervals, ...] | None
        if not isinstance(tensor, DTensor):
            dims = tuple(map(intervals.whole, local.shape))
        elif (cut := (tensor.device_mesh, tensor.placements, tensor.shape)) in known:
            dims = known[cut]
        else:
            mesh = read_mesh(tensor, label, ranks_of_mesh(tensor.device_mesh)[1])
            if any(placement.kind == "partial" for placement in mesh.placements):
                raise PlanError(
                    f"{label}: holds a pending sum, {tensor.placements}, and no weights"
                )
            dims = known[cut] = mesh_intervals(mesh, torch.distributed.get_rank(), label)
        held = None if dims is None else tuple(map(intervals.total_length, dims))
        if held is not None and held != local.shape:
            raise PlanError(
                f"{label}: holds shape {tuple(local.shape)}, but the rank's part of the DTensor of shape "
                f"{tuple(tensor.shape)} has shape {held}"
            )
        parts = [_Part(dims, local)] if dims is not None and 0 not in local.shape else []
        return _IndexTensor.make(tensor, label, tuple((size,) for size in tensor.shape), parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _OPERATIONS.get(func)
        if run is None or (kwargs and set(kwargs) - {"memory_format"}):
            label = next(each.label for each in _flat(args) if isinstance(each, _IndexTensor))
            raise PlanError(
                f"{label}: {func} of the conversion changes elements or is not known as one that keeps "
                "them, so that no place in storage is what comes out"
            )
        return run(*args)

    def with_factors(self, factors: tuple[Shape, ...], parts: Sequence[_Part]) -> _IndexTensor:
        """Return other factors and parts of the same tensor."""
        return _IndexTensor.make(self, self.label, factors, parts)

    def refuse(self, why: str) -> PlanError:
        """Return what to raise."""
        return PlanError(f"{self.label}: {why}: what comes out is no rectangle of what is there")

    def flat(self) -> Shape:
        """Return the factors of all dimensions."""
        return tuple(itertools.chain.from_iterable(self.factors))

    def first_factor(self, dim: int) -> int:
        """Return the number of a dimension's first factor among all."""
        return sum(map(len, self.factors[:dim]))


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for each in args:
        yield from each if isinstance(each, (list, tuple)) else (each,)


def _wrap(tensor: _IndexTensor, dim: int, num_more: int = 0) -> int:
    return dim % (len(tensor.factors) + num_more)


def _same(tensor: _IndexTensor) -> _IndexTensor:
    return tensor.with_factors(tensor.factors, tensor.parts)


# ---------------------------------------------------------------------------------------------
# Parts


def _narrow_part(part: _Part, at: int, start: int, stop: int) -> list[_Part]:
    """Elements of indices `[start, stop)` of a factor; as many parts as they lie apart locally."""
    held = part.dims[at]
    if len(held) == 1:  # the usual case, of thousands of experts
        ((first, local, length),) = held
        begin, end = max(first, start), min(first + length, stop)
        if begin >= end:
            return []
        dims = (*part.dims[:at], (Interval(begin - start, 0, end - begin),), *part.dims[at + 1 :])
        return [_Part(dims, part.view.narrow(at, local + begin - first, end - begin))]
    runs: list[list[Interval]] = []
    for first, local, length in held:
        begin, end = max(first, start), min(first + length, stop)
        if begin >= end:
            continue
        here = Interval(begin - start, local + begin - first, end - begin)
        last = runs[-1][-1] if runs else None
        if last is not None and last.local_start + last.length == here.local_start:
            runs[-1].append(here)
        else:
            runs.append([here])
    found = []
    for run in runs:
        origin = run[0].local_start
        held = tuple(Interval(each[0], each[1] - origin, each[2]) for each in run)
        view = part.view.narrow(at, origin, intervals.total_length(held))
        found.append(_Part((*part.dims[:at], held, *part.dims[at + 1 :]), view))
    return found


def _split_part(part: _Part, at: int, factors: Shape) -> list[_Part]:
    """The same with a factor as several; cut where what is held begins or ends within an outer one."""
    if len(factors) == 1:
        return [part]
    held = split(part.dims[at], factors)
    if held is not None:
        sizes, dims = zip(*held, strict=True)
        view = part.view.view(*part.view.shape[:at], *sizes, *part.view.shape[at + 1 :])
        return [_Part((*part.dims[:at], *dims, *part.dims[at + 1 :]), view)]
    inner = intervals.num_elements(factors[1:])
    found = []
    for start, local, length in part.dims[at]:
        whole = {
            start,
            start + length,
            -(-start // inner) * inner,
            (start + length) // inner * inner,
        }
        for begin, end in itertools.pairwise(sorted(whole)):
            if not start <= begin < end <= start + length:
                continue
            piece = _Part(
                (*part.dims[:at], (Interval(begin, 0, end - begin),), *part.dims[at + 1 :]),
                part.view.narrow(at, local + begin - start, end - begin),
            )
            outer = begin // inner
            if end - begin < inner:
                low = begin - outer * inner
                rest = piece._replace(
                    dims=(*part.dims[:at], (Interval(low, 0, end - begin),), *part.dims[at + 1 :])
                )
                found += [
                    _Part(
                        (*each.dims[:at], (Interval(outer, 0, 1),), *each.dims[at:]),
                        each.view.unsqueeze(at),
                    )
                    for each in _split_part(rest, at, factors[1:])
                ]
            else:
                found += _split_part(piece, at, factors)
    return found


# ---------------------------------------------------------------------------------------------
# What torch calls


def _narrow(tensor: _IndexTensor, dim: int, start: int, stop: int) -> _IndexTensor:
    at, factors = tensor.first_factor(dim), tensor.factors[dim]
    parts, kept = tensor.parts, []
    for number, size in enumerate(factors):
        inner = intervals.num_elements(factors[number + 1 :])
        first, last = start // inner, (stop - 1) // inner + 1
        is_whole = start % inner == 0 and stop % inner == 0
        if not is_whole and last - first > 1:
            raise tensor.refuse(f"indices [{start}, {stop}) of factors {factors} are taken")
        if (first, last) != (0, size):
            parts = [
                each for part in parts for each in _narrow_part(part, at + number, first, last)
            ]
        kept.append(last - first)
        if is_whole:
            kept += factors[number + 1 :]
            break
        start, stop = start - first * inner, stop - first * inner
    return tensor.with_factors(
        (*tensor.factors[:dim], tuple(kept), *tensor.factors[dim + 1 :]), parts
    )


def _slice(
    tensor: _IndexTensor,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> _IndexTensor:
    dim = _wrap(tensor, dim)
    size = tensor.shape[dim]
    begin, end, _ = slice(start, stop).indices(size)
    if (begin, end, step) == (0, size, 1):
        return _same(tensor)
    if step == 1:
        if begin >= end:
            raise tensor.refuse(f"indices [{begin}, {end}) of dimension {dim} are taken")
        return _narrow(tensor, dim, begin, end)
    rest = begin % step
    if size % step or end != size or begin != rest:
        raise tensor.refuse(f"every {step}th of {size} indices from {begin} to {end} is taken")
    halves = _view(tensor, [*tensor.shape[:dim], size // step, step, *tensor.shape[dim + 1 :]])
    return _select(halves, dim + 1, rest)


def _split_sizes(tensor: _IndexTensor, sizes: Sequence[int], dim: int = 0) -> list[_IndexTensor]:
    dim = _wrap(tensor, dim)
    ends = list(itertools.accumulate(sizes))
    return [
        _narrow(tensor, dim, end - size, end) if size else _slice(tensor, dim, end, end)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _split_evenly(tensor: _IndexTensor, size: int, dim: int = 0) -> list[_IndexTensor]:
    total = tensor.shape[dim]
    starts = range(0, total, size)
    return _split_sizes(tensor, [min(size, total - start) for start in starts], dim)


def _drop(tensor: _IndexTensor, dim: int) -> _IndexTensor:
    """Drop a dimension of size 1."""
    at, number = tensor.first_factor(dim), len(tensor.factors[dim])
    parts = tensor.parts
    for _ in range(number):
        parts = [
            _Part((*part.dims[:at], *part.dims[at + 1 :]), part.view.select(at, 0))
            for part in parts
        ]
    return tensor.with_factors((*tensor.factors[:dim], *tensor.factors[dim + 1 :]), parts)


def _squeeze(tensor: _IndexTensor, dim: int | Sequence[int] | None = None) -> _IndexTensor:
    every = range(tensor.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    squeezed = tensor
    for each in sorted((_wrap(tensor, each) for each in every), reverse=True):
        squeezed = _drop(squeezed, each) if squeezed.shape[each] == 1 else squeezed
    return _same(tensor) if squeezed is tensor else squeezed


def _unsqueeze(tensor: _IndexTensor, dim: int) -> _IndexTensor:
    dim = _wrap(tensor, dim, 1)
    at = tensor.first_factor(dim)
    parts = [
        _Part((*part.dims[:at], intervals.whole(1), *part.dims[at:]), part.view.unsqueeze(at))
        for part in tensor.parts
    ]
    return tensor.with_factors((*tensor.factors[:dim], (1,), *tensor.factors[dim:]), parts)


def _select(tensor: _IndexTensor, dim: int, index: int) -> _IndexTensor:
    dim = _wrap(tensor, dim)
    index %= tensor.shape[dim]
    return _drop(_narrow(tensor, dim, index, index + 1), dim)


def _unbind(tensor: _IndexTensor, dim: int = 0) -> list[_IndexTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _permute(tensor: _IndexTensor, order: Sequence[int]) -> _IndexTensor:
    dims = [_wrap(tensor, dim) for dim in order]
    flat = [
        tensor.first_factor(dim) + number
        for dim in dims
        for number in range(len(tensor.factors[dim]))
    ]
    parts = [
        _Part(tuple(part.dims[each] for each in flat), part.view.permute(flat))
        for part in tensor.parts
    ]
    return tensor.with_factors(tuple(tensor.factors[dim] for dim in dims), parts)


def _transpose(tensor: _IndexTensor, dim0: int = 0, dim1: int = 1) -> _IndexTensor:
    order = list(range(tensor.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _cuts(*shapes: Iterable[int]) -> list[int] | None:
    """Return the coarsest factors that all shapes of one number of elements are products of; None without."""
    ends = sorted({1}.union(*(itertools.accumulate(shape, operator.mul) for shape in shapes)))
    pairs = list(itertools.pairwise(ends))
    return None if any(end % start for start, end in pairs) else [b // a for a, b in pairs]


def _grouped(factors: Iterable[int], sizes: Iterable[int]) -> tuple[Shape, ...]:
    """Return the factors of every size, of those of all."""
    rest = iter(factors)
    groups = []
    for size in sizes:
        group: list[int] = []
        while intervals.num_elements(group) < size:
            group.append(next(rest))
        groups.append(tuple(group))
    return tuple(groups)


def _view(tensor: _IndexTensor, shape: Sequence[int]) -> _IndexTensor:
    known = intervals.num_elements(size for size in shape if size >= 0)
    sizes = [tensor.numel() // known if size < 0 else size for size in shape]
    flat = _squeeze(tensor.with_factors(tuple((each,) for each in tensor.flat()), tensor.parts))
    fine = None if 0 in sizes else _cuts(flat.shape, sizes)
    if fine is None:
        raise tensor.refuse(f"factors {tensor.factors} are viewed as {tuple(sizes)}")
    parts = flat.parts
    for at, factors in reversed(list(enumerate(_grouped(fine, flat.shape)))):
        parts = [each for part in parts for each in _split_part(part, at, factors)]
    viewed = tensor.with_factors(_grouped(fine, (size for size in sizes if size > 1)), parts)
    for dim, size in enumerate(sizes):
        viewed = _unsqueeze(viewed, dim) if size == 1 else viewed
    return viewed


def _cat(tensors: Sequence[_IndexTensor], dim: int = 0) -> _IndexTensor:
    first = tensors[0]
    dim = _wrap(first, dim)
    inner = max((tensor.factors[dim][1:] for tensor in tensors), key=len)
    step = intervals.num_elements(inner)
    factors: list[Shape] = []
    for each in zip(*(tensor.factors for tensor in tensors), strict=True):
        fine = _cuts(*each) if len(factors) != dim else [1, *inner]
        if fine is None or (len(factors) == dim and any(t.shape[dim] % step for t in tensors)):
            raise first.refuse(f"tensors of factors {each} are concatenated")
        factors.append(tuple(fine) or (1,))
    at, total, parts = sum(map(len, factors[:dim])), 0, []
    for tensor in tensors:
        size = tensor.shape[dim] // step
        factors[dim] = (size, *inner)
        viewed = _view(tensor, list(itertools.chain.from_iterable(factors)))
        if any(len(each) > 1 for each in viewed.factors):
            raise first.refuse(
                f"tensors of factors {tensor.factors} and {factors} are concatenated"
            )
        for part in viewed.parts:
            held = tuple(each._replace(global_start=each[0] + total) for each in part.dims[at])
            parts.append(_Part((*part.dims[:at], held, *part.dims[at + 1 :]), part.view))
        total += size
    factors[dim] = (total, *inner)
    return first.with_factors(tuple(factors), parts)


def _stack(tensors: Sequence[_IndexTensor], dim: int = 0) -> _IndexTensor:
    dim = _wrap(tensors[0], dim, 1)
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten._reshape_alias.default: lambda tensor, shape, _: _view(tensor, shape),
    _aten._unsafe_view.default: _view,
    _aten.alias.default: _same,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split_evenly,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.view.default: _view,
}
