"""A GPU that is none: CPU memory that claims another device, in the order of emulated streams.

What is written for tensors on a GPU runs on it as it does there in two respects. torch refuses to mix its
tensors with the host's, and its own operations wait for the current stream and for no other. Kernels of
this package are the emulator's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm import Communicator
from moe_comm.ep import group_buffers
from moe_comm.ep.autograd import operators
from moe_comm.ep.backends import simt
from moe_comm.ep.backends.simt import SimtBackend

DEVICE = torch.device("meta")
"""The one kind of device of which every build of torch can make tensors that this module fills."""

_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
# Tables of the GPU may be read by indices of the host.
_INDEXED = frozenset({"aten::index", "aten::index_put_", "aten::index_put"})
_OF_DEVICE = frozenset({"x", "x_sf", "topk_idx", "topk_weights", "expert_offsets", "status"})


class _Pretended(torch.Tensor):
    """A tensor of `DEVICE` whose elements are in `inner`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[_Pretended], inner: torch.Tensor) -> _Pretended:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @property
    def is_meta(self) -> bool:
        return False  # it has elements

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def __repr__(self) -> str:
        return f"pretended {self.inner!r}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _wrapped(tensor: Any) -> Any:
    is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, _Pretended)
    return _Pretended(tensor) if is_plain else tensor


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name.startswith("moe_comm::"):
        # The kernel itself: the device whose name is borrowed has kernels of its own, which move nothing.
        return getattr(operators, "_" + name.partition("::")[2])(*args, **kwargs)
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    is_there = any(isinstance(each, _Pretended) for each in given)
    asked = kwargs.get("device")
    is_made_there = is_there if asked is None else torch.device(asked) == DEVICE
    if not is_there and not is_made_there:
        return func(*args, **kwargs)
    if is_there and name not in _COPIES:
        checked = given[:1] if name in _INDEXED else given
        if not all(isinstance(each, _Pretended) or each.dim() == 0 for each in checked):
            raise RuntimeError(f"{func}: tensors on {[str(each.device) for each in given]}")
    stream = simt.current_stream()
    if stream is not None:
        stream.synchronize()
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = pytree.tree_map_only(
        _Pretended, lambda each: each.inner, (args, kwargs)
    )
    result = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable and isinstance(result, torch.Tensor):
        for outer, inner in zip(
            pytree.tree_leaves((args, kwargs)),
            pytree.tree_leaves((inner_args, inner_kwargs)),
            strict=True,
        ):
            if inner is result:
                return outer
    return pytree.tree_map(_wrapped, result) if is_made_there else result


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """`torch.tensor` and its like fill memory without an operation that could be seen."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = torch.device(kwargs.pop("device"))
            return func(*args, device="cpu", **kwargs).to(device)
        return func(*args, **kwargs)


class Stream:
    """Stand-in for `torch.cuda.Stream`, over one of the emulator."""

    def __init__(self, device: Any = None, priority: int = 0, beneath: Any = None) -> None:
        self.beneath = simt.Stream() if beneath is None else beneath
        self.device = DEVICE

    def wait_stream(self, other: Stream) -> None:
        self.beneath.wait(other.beneath.record())

    def wait_event(self, event: Any) -> None:
        self.beneath.wait(event)

    def record_event(self) -> Any:
        return self.beneath.record()


class _Cuda:
    """Names that `moe_comm.compat.deep_ep.streams` takes of `torch.cuda`."""

    Stream = Stream

    @staticmethod
    def is_initialized() -> bool:
        return simt.current_stream() is not None

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        return Stream(beneath=simt.current_stream())

    @staticmethod
    def stream(stream: Stream) -> Any:
        return simt.use_stream(stream.beneath)


class _Arrived:
    """An operation, and its output whose tensors are on `DEVICE`."""

    def __init__(self, beneath: Any) -> None:
        self._beneath = beneath

    def wait(self) -> _Arrived:
        return _Arrived(self._beneath.wait())

    @property
    def early(self) -> _Arrived | None:
        return None if self._beneath.early is None else _Arrived(self._beneath.early)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._beneath, name)
        return _wrapped(value) if name in _OF_DEVICE else value


class _PretendedBackend(SimtBackend):
    def dispatch(self, *args: Any, **options: Any) -> Any:
        return _Arrived(super().dispatch(*args, **options))

    def dispatch_cached(self, *args: Any, **options: Any) -> Any:
        return _Arrived(super().dispatch_cached(*args, **options))

    def combine(self, *args: Any, **options: Any) -> Any:
        return _Arrived(super().combine(*args, **options))

    def empty_expert_output(self, *args: Any) -> torch.Tensor:
        return _wrapped(super().empty_expert_output(*args))


class PretendedCommunicator(Communicator):
    """`host` for the CPU, the emulator for `DEVICE`."""

    def __init__(self, group: Any, device: Any = "cpu", *, backend: str = "auto") -> None:
        wanted = torch.device(device)
        super().__init__(group, backend="simt" if wanted == DEVICE else "host")
        self.device = wanted
        self.streams_of_results: list[Any] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        made = super().empty(*shape, dtype=dtype)
        return _wrapped(made) if self.device == DEVICE else made

    def use_on(self, stream: Any) -> None:
        self.streams_of_results.append(stream.beneath)


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Let surfaces that know their group alone find `DEVICE`. For all ranks that are threads of this process."""
    patch.setattr("moe_comm.ep.group_buffers.Communicator", PretendedCommunicator)
    patch.setattr("moe_comm.compat.deep_ep.streams.cuda", _Cuda)
    patch.setattr("moe_comm.compat.deep_ep.streams.GPU", DEVICE.type)
    device_for = group_buffers._device_for

    def device_of_group(group: Any) -> Any:
        # The group as if it were one of this device, where that is torch's default.
        return DEVICE if torch.get_default_device() == DEVICE else device_for(group)

    patch.setattr("moe_comm.ep.group_buffers._device_for", device_of_group)
    load = "moe_comm.ep.backends.buffer_agreement.load_backend"
    from moe_comm.ep.backends import load_backend

    patch.setattr(load, lambda name, _: _backend(name, load_backend))


def _backend(name: str, load_backend: Any) -> Any:
    return _PretendedBackend if name == "simt" else load_backend(name)


@contextlib.contextmanager
def on_pretended_device() -> Iterator[simt.Stream]:
    """Within it this thread, a rank, has a current stream and may make tensors on `DEVICE`."""
    with simt.use_stream(simt.Stream()) as stream, _Literals(), _Dispatch():
        yield stream
