"""Tensors of an engine as its own loader fills them: a run of `load_weights` without values, written down."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.intervals import Box, Interval
from moe_comm.resharding.describe.tensor_layout import Layout, Shape, common_shape, refine
from moe_comm.tensors.memory import num_spanned, storage_id

__all__ = ["LoadWeights", "LoaderViews", "TensorSpec", "loader_views"]

aten = torch.ops.aten

LoadWeights = Callable[[Iterator[tuple[str, torch.Tensor]]], object]

_VIEWS = frozenset(
    {
        aten._reshape_alias.default,
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
_COPIES = frozenset({aten._to_copy.default, aten.clone.default})
_CONSTANTS = frozenset({aten.fill_.Scalar, aten.zero_.default})
# Held by the thread that has pools run in it.
_of_pools = threading.RLock()


class TensorSpec(NamedTuple):
    """A tensor of a checkpoint, without its values. Its text is that of messages."""

    shape: Shape
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: TensorSpec | torch.Tensor) -> TensorSpec:
        """Return that of a tensor, or of anything with a shape and a dtype."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class _Geometry(NamedTuple):
    """Elements of a storage: per dimension how many, how far apart, and which is the first."""

    shape: Shape
    stride: Shape
    offset: int


class _Origin(NamedTuple):
    """The tensor of the checkpoint whose indices a storage without memory stands for.

    Args:
        name: Name in the checkpoint.
        spec: Shape and dtype in the checkpoint.
        cast: The dtype that the loader made of it.
        orders: Places of the elements, where the storage has others or in another order: those of a copy that
            a loader made for itself, as they lay in the storage it is of; and so on, to that of the
            checkpoint.
    """

    name: str
    spec: TensorSpec
    cast: torch.dtype
    orders: tuple[_Geometry, ...] = ()


class _Target(NamedTuple):
    """A tensor that a loader fills."""

    name: str
    tensor: torch.Tensor
    first: int
    stop: int


class _Copy(NamedTuple):
    """One copy of a loader; without an origin, of a constant."""

    target: _Target
    geometry: _Geometry
    read: _Geometry
    origin: _Origin | None
    constant: float


class _Axis(NamedTuple):
    """Indices of one dimension of a base, and how a view walks them."""

    size: int
    start: int
    length: int
    view_dim: int | None
    num_inner: int


@dataclasses.dataclass(frozen=True)
class LoaderViews:
    """Places of an engine, by the names of a checkpoint.

    Args:
        views: Every copy of the loader, in its order.
        padding: Views of what the loader fills with a constant, and the constant.
        ignored: Names that fill nothing here, because other ranks hold them.
    """

    views: tuple[CheckpointView, ...]
    padding: tuple[tuple[torch.Tensor, float], ...]
    ignored: frozenset[str]


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return _Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@functools.lru_cache(maxsize=65536)
def _axes(base: _Geometry, view: _Geometry) -> tuple[_Axis, ...] | None:
    """Return a view as a product of intervals of its base, whose dimensions are cut where it needs it.

    Args:
        base: Its elements do not overlap.
        view: View of the same storage.

    Returns:
        Axes from the farthest apart to the nearest; `num_inner` elements of dimension `view_dim` of
        the view are passed by one step along the axis. None where it is no such product.
    """
    order = sorted(
        (dim for dim, size in enumerate(base.shape) if size > 1),
        key=lambda dim: base.stride[dim],
        reverse=True,
    )
    steps = {step for size, step in zip(view.shape, view.stride, strict=True) if size > 1}
    cells: list[tuple[int, int]] = []
    for dim in order:
        size, step = base.shape[dim], base.stride[dim]
        inner = sorted(cut for cut in steps if step < cut < step * size)
        edges = [step, *inner, step * size]
        if any(after % before for before, after in itertools.pairwise(edges)):
            return None
        cells += [(edges[at + 1] // edges[at], edges[at]) for at in reversed(range(len(edges) - 1))]
    rest = view.offset - base.offset
    starts = []
    for _, step in cells:
        starts.append(rest // step)
        rest %= step
    if rest or any(not 0 <= at < size for at, (size, _) in zip(starts, cells, strict=True)):
        return None
    walked: dict[int, tuple[int, int, int]] = {}
    for view_dim, (count, step) in enumerate(zip(view.shape, view.stride, strict=True)):
        num_inner = 1
        while count > 1:
            # A dimension that is longer than the axis goes on along the one before it.
            at = next((at for at, cell in enumerate(cells) if cell[1] == step), None)
            if at is None or at in walked:
                return None
            size = cells[at][0]
            length = min(count, size)
            if starts[at] + length > size or count % length:
                return None
            walked[at] = (length, view_dim, num_inner)
            count, step, num_inner = count // length, step * size, num_inner * length
            if count > 1 and length != size:
                return None
    return tuple(
        _Axis(size, start, *walked.get(at, (1, None, 1)))
        for at, ((size, _), start) in enumerate(zip(cells, starts, strict=True))
    )


def _contiguous(shape: Shape) -> _Geometry:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return _Geometry(shape, tuple(reversed(strides)), 0)


class _Reading(float):
    """Number that stands for a tensor of one element, with which a loader may fill a parameter, and no more.

    Args:
        number: Value by which it is known again.
        refuse: Callable that gives the error of whatever else is asked of it.
    """

    refuse: Callable[[str], Exception]

    def __new__(cls, number: float, refuse: Callable[[str], Exception]) -> _Reading:
        made = super().__new__(cls, number)
        made.refuse = refuse
        return made


def _refuse_reading(operation: str) -> Callable[..., Any]:
    def refuse(number: _Reading, *_: object) -> Any:
        raise number.refuse(operation)

    return refuse


_COMPARISONS = {"__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"}
for _operation in _COMPARISONS | set(dir(float)) - set(dir(object)):
    setattr(_Reading, _operation, _refuse_reading(f"{_operation} of its value"))


_OTHER_MEMORY = "other memory for the parameter"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader: lets views pass, writes copies down, refuses the rest.

    Tensors of the checkpoint are on the meta device. A storage there stands for the elements of one
    of them, in order, however a tensor looks at it.
    """

    def __init__(self, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[_Copy] = []
        self.current = ""
        self.refusal: Exception | None = None
        self._origins: dict[int, _Origin] = {}
        self._scalars: dict[float, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._given = [(name, tensor, tensor.detach()) for name, tensor in targets]
        self._targets: dict[int, list[_Target]] = {}
        for name, tensor, detached in self._given:
            if tensor.numel():
                first = int(tensor.storage_offset())
                target = _Target(name, detached, first, first + num_spanned(tensor))
                self._targets.setdefault(storage_id(tensor), []).append(target)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation the wrapper that keeps compiled code out; none is compiled here."""
        return False

    def tensors(self, checkpoint: Mapping[str, TensorSpec]) -> list[tuple[str, torch.Tensor]]:
        """Make names and tensors without memory, as a loader takes them."""
        made = []
        for name, spec in checkpoint.items():
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            self._keep(tensor, _Origin(name, spec, spec.dtype))
            made.append((name, tensor))
        return made

    def in_turn(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand out one after the other, and remember which a loader has."""
        for self.current, tensor in named:
            yield self.current, tensor

    def put_back(self) -> None:
        """Give targets the memory that they had, and refuse a loader that gave them other."""
        for name, tensor, kept in self._given:
            if (storage_id(tensor), _geometry(tensor)) != (storage_id(kept), _geometry(kept)):
                if tensor.device == kept.device:
                    tensor.data = kept
                self.refuse(name, _OTHER_MEMORY)

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Run here what this thread gives to a pool; another thread, where nothing is seen, is refused.

        So is another parameter in the place of a target. A value that is read is a `_Reading`.
        """
        here = threading.get_ident()

        def submit_here(
            pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Future[Any]:
            if threading.get_ident() != here:
                return submit(pool, function, *args, **kwargs)
            future: Future[Any] = Future()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)
            return future

        def start_none(thread: threading.Thread) -> None:
            # Those of progress bars and the like are daemons.
            if threading.get_ident() == here and not thread.daemon:
                raise self.refuse(self.current, f"a thread of its own ({thread.name})")
            start(thread)

        def read_here(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == here and tensor.dtype.is_floating_point:
                origin = self._origin(tensor)
                if origin is not None and tensor.numel() == 1:
                    return self._reading(tensor, origin.name)
            return item(tensor)

        def keep_target(module: torch.nn.Module, name: str, _: object) -> None:
            replaced = module._parameters.get(name)
            if threading.get_ident() == here and replaced is not None and self._target(replaced):
                raise self.refuse(self.current, f"another parameter in the place of {name}")

        with _of_pools:
            submit, start = ThreadPoolExecutor.submit, threading.Thread.start
            item = torch.Tensor.item
            hook = register_module_parameter_registration_hook(keep_target)
            try:
                ThreadPoolExecutor.submit = submit_here  # type: ignore[method-assign,assignment]
                threading.Thread.start = start_none  # type: ignore[method-assign,assignment]
                torch.Tensor.item = read_here  # type: ignore[method-assign,assignment]
                yield
            finally:
                ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
                threading.Thread.start = start  # type: ignore[method-assign]
                torch.Tensor.item = item  # type: ignore[method-assign]
                hook.remove()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is aten.copy_.default:
            origin = self._origin(args[1])
            if origin is not None:
                return self._copy(args[0], args[1], origin)
        elif func in _VIEWS:
            return func(*args, **(kwargs or {}))
        read = next((each for each in _tensors((args, kwargs)) if self._origin(each)), None)
        if read is None:
            return self._without_checkpoint(func, args, kwargs or {})
        origin = self._origin(read)
        assert origin is not None
        if func is aten._unsafe_view.default:
            return self._view(func, read, args[1], origin)
        if func in _COPIES:
            return self._copied(read, kwargs or {}, origin)
        raise self.refuse(origin.name, f"{func} of it")

    def _origin(self, tensor: Any) -> _Origin | None:
        if tensor.device.type != "meta":
            return None
        return self._origins.get(storage_id(tensor))

    def _keep(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self._kept.append(tensor)
        self._origins[storage_id(tensor)] = origin

    def refuse(self, name: str, what: str) -> Exception:
        """Return what to raise; kept, because a loader may go on without it."""
        error = NotImplementedError(
            f"{name}: the loader asks for {what}; a refit writes views of a tensor of a checkpoint, "
            "and one cast on the way"
        )
        self.refusal = self.refusal or error
        return error

    def _view(self, func: Any, read: torch.Tensor, shape: Any, origin: _Origin) -> torch.Tensor:
        try:
            return read.view(shape)
        except RuntimeError:
            raise self.refuse(
                origin.name, f"{func} to {tuple(shape)} of shape {tuple(read.shape)}"
            ) from None

    def _copied(
        self, read: torch.Tensor, options: Mapping[str, Any], origin: _Origin
    ) -> torch.Tensor:
        """Return another storage of the same elements: a copy that keeps where each comes from."""
        dtype = options.get("dtype") or read.dtype
        if origin.cast not in (origin.spec.dtype, dtype):
            raise self.refuse(origin.name, f"a cast to {origin.cast} and one to {dtype}")
        copied = torch.empty_like(
            read,
            dtype=dtype,
            device="meta",
            memory_format=options.get("memory_format") or torch.preserve_format,
        )
        # By strides, the farthest apart first: the order in which the copy has the elements.
        order = sorted(range(copied.dim()), key=copied.stride, reverse=True)
        orders = (_geometry(read.permute(order)), *origin.orders)
        self._keep(copied, origin._replace(cast=dtype, orders=orders))
        return copied

    def _reading(self, read: torch.Tensor, name: str) -> _Reading:
        """Return a number that is known again when a tensor is filled with it."""
        number = 2.0**100 + len(self._scalars) * 2.0**80  # a float32
        self._scalars[number] = read
        return _Reading(number, functools.partial(self.refuse, name))

    def _target(self, written: torch.Tensor) -> _Target | None:
        offset = written.storage_offset()
        for target in self._targets.get(storage_id(written), ()):
            if target.first <= offset < target.stop:
                return target
        return None

    def _copy(self, written: torch.Tensor, read: torch.Tensor, origin: _Origin) -> torch.Tensor:
        if not written.numel():
            return written
        target = self._target(written)
        if target is None:
            raise self.refuse(
                origin.name, f"a copy into a tensor of shape {tuple(written.shape)}, no parameter"
            )
        dtypes = (origin.spec.dtype, written.dtype)
        if origin.cast not in dtypes or written.dtype != target.tensor.dtype:
            raise self.refuse(
                origin.name,
                f"a cast to {origin.cast} before a copy as {written.dtype} into {target.name} of "
                f"{target.tensor.dtype}",
            )
        geometry = _geometry(written)
        read_geometry = _geometry(read)
        if read_geometry.shape != geometry.shape:
            try:
                read_geometry = _geometry(read.expand(geometry.shape))
            except RuntimeError:
                raise ValueError(
                    f"a copy of shape {tuple(read.shape)} into shape {geometry.shape} of {target.name}"
                ) from None
        self.copies.append(_Copy(target, geometry, read_geometry, origin, 0.0))
        return written

    def _without_checkpoint(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Let pass what neither reads the checkpoint nor writes a target; write constants down."""
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        written = args[0] if args and isinstance(args[0], torch.Tensor) else None
        target = None if written is None else self._target(written)
        if target is None and not any(map(self._target, _tensors((args[1:], kwargs)))):
            return func(*args, **kwargs)
        if func not in _CONSTANTS or written is None or target is None:
            name = target.name if target is not None else self.current
            raise self.refuse(self.current, f"{func} into {name}, with values that are not its")
        constant = float(args[1]) if len(args) > 1 else 0.0
        read = self._scalars.get(constant)
        if read is not None:
            origin = self._origin(read)
            assert origin is not None
            return self._copy(written, read, origin)
        if written.numel():
            geometry = _geometry(written)
            self.copies.append(_Copy(target, geometry, geometry, None, constant))
        return written


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments, in lists too."""
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))


_Pair = tuple[_Geometry, _Geometry]


def _split_repeats(read: _Geometry, written: _Geometry) -> Iterator[_Pair]:
    """Yield the read and the written elements once for every index of a dimension that repeats one."""
    shape, stride, offset = read
    repeated = [dim for dim, size in enumerate(shape) if size > 1 and not stride[dim]]
    if not repeated:
        yield read, written
        return
    once = tuple(1 if dim in repeated else size for dim, size in enumerate(shape))
    counts = tuple(shape[dim] for dim in repeated)
    for number in range(intervals.num_elements(counts)):
        first = written.offset
        for dim in reversed(repeated):
            number, index = divmod(number, shape[dim])
            first += index * written.stride[dim]
        yield _Geometry(once, stride, offset), _Geometry(once, written.stride, first)


def _through(order: _Geometry, read: _Geometry, written: _Geometry) -> _Pair | None:
    """Return what is read of a copy as what is read of the storage that it is of, in finer dimensions.

    Args:
        order: The elements of the copy, in its order, in that storage.
        read: Geometry of what is read of the copy.
        written: Geometry of that in the target, with as many dimensions.

    Returns:
        None where `read` is no product of intervals of the copy.
    """
    axes = _axes(_contiguous(order.shape), read)
    if axes is None:
        return None
    rest = list(axes)
    lengths, steps, strides, offset = [], [], [], order.offset
    for size, step in zip(order.shape, order.stride, strict=True):
        while size > 1:
            axis = rest.pop(0)
            size //= axis.size
            lengths.append(axis.length)
            steps.append(step * size)
            strides.append(_stride(axis, written))
            offset += axis.start * step * size
    shape = tuple(lengths)
    return (
        _Geometry(shape, tuple(steps), offset),
        _Geometry(shape, tuple(strides), written.offset),
    )


def _stride(axis: _Axis, written: _Geometry) -> int:
    return 0 if axis.view_dim is None else written.stride[axis.view_dim] * axis.num_inner


def _views(copy: _Copy, origin: _Origin) -> Iterator[CheckpointView]:
    pairs: Iterable[_Pair | None] = _split_repeats(copy.read, copy.geometry)
    for order in origin.orders:
        finer = [pair and _through(order, *pair) for pair in pairs]
        pairs = [once for pair in finer for once in (_split_repeats(*pair) if pair else [None])]
    shape = origin.spec.shape
    for pair in pairs:
        axes = pair and _axes(_contiguous(shape), pair[0])
        if not pair or axes is None:
            raise NotImplementedError(
                f"{origin.name}: the loader copies shape {copy.read.shape}, strides {copy.read.stride}, "
                f"offset {copy.read.offset} of shape {shape} into {copy.target.name}; that is no "
                "product of intervals"
            )
        written = pair[1]
        cut = tuple(axis.size for axis in axes)
        yield CheckpointView(
            origin.name,
            cut,
            tuple((Interval(axis.start, 0, axis.length),) for axis in axes),
            copy.target.tensor.as_strided(
                tuple(axis.length for axis in axes),
                tuple(_stride(axis, written) for axis in axes),
                written.offset,
            ),
            None if cut == shape else shape,
        )


def _box(copy: _Copy) -> tuple[Shape, Box]:
    """Return the finer shape of a target that a copy needs, and what the copy writes of it."""
    axes = _axes(_geometry(copy.target.tensor), copy.geometry)
    if axes is None:
        name = copy.origin.name if copy.origin else "a constant"
        raise NotImplementedError(
            f"{name}: the loader writes shape {copy.geometry.shape}, strides {copy.geometry.stride}, "
            f"offset {copy.geometry.offset} of {copy.target.name} of shape "
            f"{tuple(copy.target.tensor.shape)}; that is no product of intervals"
        )
    return (
        tuple(axis.size for axis in axes),
        tuple((axis.start, axis.start + axis.length) for axis in axes),
    )


def _boxes(copies: list[_Copy]) -> tuple[Shape, list[Box]]:
    """Return the boxes of one target that copies write, all in one finer shape of it."""
    found = [_box(copy) for copy in copies]
    shapes = {shape for shape, _ in found}
    if len(shapes) == 1:
        return shapes.pop(), [box for _, box in found]
    finest = common_shape(shapes)
    boxes = []
    for shape, box in found:
        held = tuple((Interval(start, 0, stop - start),) for start, stop in box)
        sizes = tuple(stop - start for start, stop in box)
        layout = refine(Layout(sizes, shape, held), finest) if finest else None
        if finest is None or layout is None:
            raise NotImplementedError(
                f"the loader fills {copies[0].target.name} in parts of shapes {sorted(shapes)}, which "
                "are no views of each other"
            )
        boxes.append(tuple((part[0][0], part[0][0] + part[0][2]) for part in layout.dims))
    assert finest is not None
    return finest, boxes


def _uncovered(copies: list[_Copy], boxes: list[Box]) -> list[Box]:
    """Return the parts of constants that no later copy writes.

    Raises:
        NotImplementedError: A constant is written over a part of the checkpoint.
    """
    left: list[Box] = []
    written: list[tuple[str, Box]] = []
    for copy, box in zip(copies, boxes, strict=True):
        left = [part for rest in left for part in intervals.subtract(rest, box)]
        if copy.origin is not None:
            written.append((copy.origin.name, box))
            continue
        for name, other in written:
            if intervals.subtract(other, box) != [other]:
                raise NotImplementedError(
                    f"{name}: the loader writes {copy.constant} over it in {copy.target.name}"
                )
        left.append(box)
    return left


def _check_covered(name: str, tensor: torch.Tensor, copies: list[_Copy]) -> None:
    """Hold the copies into a target against it: every element once.

    Raises:
        ValueError: An element is written by no tensor of the checkpoint, or by two.
    """
    if not copies:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)}: the loader fills it from no tensor of the checkpoint"
        )
    shape, boxes = _boxes(copies)
    values = [box for copy, box in zip(copies, boxes, strict=True) if copy.origin is not None]
    if len(values) < len(boxes):
        values += _uncovered(copies, boxes)
    defect = intervals.find_defect(shape, values)
    if defect is None:
        return
    bounds = ", ".join(f"{start}:{stop}" for start, stop in defect.box)
    whole = tuple((0, size) for size in shape[len(defect.box) :])
    writers = [
        copy.origin.name
        for copy, box in zip(copies, boxes, strict=True)
        if copy.origin is not None
        and intervals.subtract((*defect.box, *whole), box) != [(*defect.box, *whole)]
    ]
    if defect.kind == "overlap":
        raise ValueError(
            f"{name}[{bounds}] of shape {shape}: the loader fills it from {' and from '.join(writers)}"
        )
    raise ValueError(
        f"{name}[{bounds}] of shape {shape}: the loader fills it from no tensor of the checkpoint"
    )


def _of_one_stack(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def loader_views(
    load_weights: LoadWeights,
    checkpoint: Mapping[str, TensorSpec | torch.Tensor],
    targets: Iterable[tuple[str, torch.Tensor]],
    *,
    optional: Iterable[tuple[str, torch.Tensor]] = (),
    other_ranks: bool = False,
) -> LoaderViews:
    """Return where an engine keeps the tensors of a checkpoint, by a run of its own loader.

    The loader gets tensors without memory. Views of them and of the targets are followed, copies are
    written down, and nothing is written to a target.

    Args:
        load_weights: Loader of the engine; takes an iterator of names and tensors.
        checkpoint: Tensors by name, in the order in which the loader gets them; anything that has a shape and
            a dtype.
        targets: Names and tensors that the loader must fill, each element once; strided, on any device.
        optional: Names and tensors that it may fill, then each element once.
        other_ranks: Whether other ranks load the same checkpoint: the loader may then pass over a name
            where it takes one that differs in numbers alone, as of another expert.

    Raises:
        NotImplementedError: The loader does more with a tensor than views, copies and a cast on the
            way; the message names tensor and operation.
        ValueError: An element of a target is filled by no name or by two, the loader passes over a
            name, or it refuses one.
    """
    required, allowed = list(targets), list(optional)
    specs = {name: TensorSpec.of(tensor) for name, tensor in checkpoint.items()}
    recorder = _Recorder([*required, *allowed])
    named = recorder.tensors(specs)
    with torch.no_grad(), recorder, recorder.in_this_thread():
        try:
            load_weights(recorder.in_turn(named))
        except Exception as error:
            if "variable.set_data(tensor)" in str(error):  # torch: the tensor has no memory
                recorder.refuse(recorder.current, _OTHER_MEMORY)
            raise recorder.refusal or ValueError(
                f"{recorder.current}: the loader refuses it: {type(error).__name__}: {error}"
            ) from error
        finally:
            recorder.put_back()
    if recorder.refusal is not None:
        raise recorder.refusal
    by_target: dict[str, list[_Copy]] = {}
    views: list[CheckpointView] = []
    padding = []
    for copy in recorder.copies:
        by_target.setdefault(copy.target.name, []).append(copy)
        if copy.origin is None:
            written = copy.target.tensor.as_strided(*copy.geometry)
            padding.append((written, copy.constant))
        else:
            views.extend(_views(copy, copy.origin))
    taken = {view.name for view in views}
    ignored = [
        name
        for name, spec in specs.items()
        if name not in taken and intervals.num_elements(spec.shape)
    ]
    stacks = {_of_one_stack(name) for name in taken} if other_ranks else set()
    extra = [name for name in ignored if _of_one_stack(name) not in stacks]
    if extra:
        raise ValueError(
            f"{extra[0]} of shape {specs[extra[0]].shape}: the loader puts it nowhere"
            f"{f', nor {len(extra) - 1} more' if len(extra) > 1 else ''}"
        )
    for name, tensor in required:
        if tensor.numel():
            _check_covered(name, tensor, by_target.get(name, []))
    for name, tensor in allowed:
        if name in by_target:
            _check_covered(name, tensor, by_target[name])
    return LoaderViews(tuple(views), tuple(padding), frozenset(ignored))
