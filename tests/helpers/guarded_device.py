"""A device of torch whose memory the host cannot read: what reads or writes it outside of torch's operators dies.

A tensor on it is a plain `torch.Tensor` with memory of its own, as on a GPU: pages without access, which open
while an operator runs on the CPU in their place. A copy to the host that need not have ended when it returns
(`non_blocking`) ends with the next one that does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

DEVICE = "guarded"

_NO_ACCESS, _READ_AND_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_EXTENSION_DEVICE, _UNSIGNED = 12, 1  # of DLPack
_POISON = 0xFF
_MOST_REGIONS = 500  # before those are looked for that nobody uses


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor of a row of bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_make_capsule = ctypes.pythonapi.PyCapsule_New
_make_capsule.restype = ctypes.py_object
_make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_lock = threading.RLock()
_regions: dict[int, tuple[StorageWeakRef, _Managed, Any]] = {}  # by their first byte
_sizes: dict[int, int] = {}  # likewise
_num_users: dict[int, int] = {}  # operators that a region is open for
_pending: list[tuple[torch.Tensor, torch.Tensor]] = []
_capturing = threading.local()
_across = [0]


def _free_unused() -> None:
    """Give back regions whose tensors are gone. Torch tells nobody: it may drop them within an error."""
    with _lock:
        for start, (storage, *_) in list(_regions.items()):
            if storage.expired():
                del _regions[start]
                _libc.munmap(start, _sizes.pop(start))


def _allocate(num_bytes: int) -> torch.Tensor:
    """Bytes of poison on the device."""
    size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    data = _libc.mmap(None, size, _READ_AND_WRITE, flags, -1, 0)
    assert data not in (None, ctypes.c_void_p(-1).value), "no memory"
    ctypes.memset(data, _POISON, size)
    assert _libc.mprotect(data, size, _NO_ACCESS) == 0
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed(data, _EXTENSION_DEVICE, 0, 1, _UNSIGNED, 8, 1, shape)
    made = torch.utils.dlpack.from_dlpack(
        _make_capsule(ctypes.addressof(managed), b"dltensor", None)
    )
    with _lock:
        _sizes[data] = size
        _regions[data] = (StorageWeakRef(made.untyped_storage()), managed, shape)
        if len(_regions) > _MOST_REGIONS:
            _free_unused()
    return made


def _on_memory_of(operator: Any, *arguments: Any) -> Any:
    """Run an operator that touches no element as on the CPU: it keeps the device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return operator.redispatch(keys, *arguments)


def _empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    dtype = options.get("dtype") or torch.get_default_dtype()
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    num_bytes = 0 if 0 in size else span * dtype.itemsize
    elements = _allocate(num_bytes).view(dtype)
    return _on_memory_of(torch.ops.aten.as_strided.default, elements, size, stride, 0)


def _empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    stride, step = [], 1
    for length in reversed(size):
        stride.insert(0, step)
        step *= max(length, 1)
    return _empty_strided(size, stride, **options)


@contextlib.contextmanager
def _opened(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Within it the elements of tensors on the device can be read and written, as CPU tensors over them."""
    starts = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    with _lock:
        for start in starts:
            _num_users[start] = _num_users.get(start, 0) + 1
            _libc.mprotect(start, _sizes[start], _READ_AND_WRITE)
    try:
        yield [_as_cpu(tensor) for tensor in tensors]
    finally:
        with _lock:
            for start in starts:
                _num_users[start] -= 1
                if not _num_users[start]:
                    del _num_users[start]
                    _libc.mprotect(start, _sizes[start], _NO_ACCESS)


def _as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    start = tensor.untyped_storage().data_ptr()
    memory = (ctypes.c_char * _sizes[start]).from_address(start)
    elements = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if non_blocking and target.is_cpu:
        _pending.append((source, target))
        return target
    synchronize()
    _copy_now(source, target)
    return target


def synchronize() -> None:
    """End the copies that need not have ended."""
    while _pending:
        _copy_now(*_pending.pop(0))


def _copy_now(source: torch.Tensor, target: torch.Tensor) -> None:
    there = [each for each in (source, target) if each.device.type == DEVICE]
    if len(there) == 1:
        _across[0] += source.numel() * source.element_size()
    with _opened(there) as opened:
        own = iter(opened)
        here = [next(own) if each.device.type == DEVICE else each for each in (source, target)]
        here[1].copy_(here[0])


def _on_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU, over the memory of the device."""
    # Numbers come as such, also where an operator takes a tensor.
    args = tuple(
        torch.tensor(each)
        if isinstance(each, int | float) and isinstance(argument.type, torch.TensorType)
        else each
        for each, argument in zip(args, operator._schema.arguments, strict=False)
    )
    leaves, form = pytree.tree_flatten((args, kwargs))
    places = [
        idx
        for idx, each in enumerate(leaves)
        if isinstance(each, torch.Tensor) and each.device.type == DEVICE
    ]
    given = [leaves[idx] for idx in places]
    leaves = [
        torch.device("cpu") if isinstance(each, torch.device) and each.type == DEVICE else each
        for each in leaves
    ]
    synchronize()
    with _opened(given) as opened:
        # What has no elements may be given some, as `out` is.
        opened = [each if each.numel() else torch.empty_like(each) for each in opened]
        for idx, tensor in zip(places, opened, strict=True):
            leaves[idx] = tensor
        cpu_args, cpu_kwargs = pytree.tree_unflatten(leaves, form)
        result = operator(*cpu_args, **cpu_kwargs)
        starts = {each.untyped_storage().data_ptr() for each in opened if each.numel()}

        def given_back(tensor: torch.Tensor) -> torch.Tensor:
            for own, cpu in zip(given, opened, strict=True):
                if tensor is cpu:
                    return own if own.shape == cpu.shape else _replace(own, cpu)
            assert tensor.untyped_storage().data_ptr() not in starts, f"{operator} makes a view"
            made = _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            _copy_now(tensor, made)
            return made

        return pytree.tree_map_only(torch.Tensor, given_back, result)


def _replace(own: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Give a tensor without elements those of one of the host, and memory for them."""
    made = _empty_strided(elements.size(), elements.stride(), dtype=elements.dtype)
    _copy_now(elements, made)
    place = (made.untyped_storage(), 0, made.size(), made.stride())
    return _on_memory_of(torch.ops.aten.set_.source_Storage_storage_offset, own, *place)


class _Module:
    """Names that torch and this package look for in `torch.guarded`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def is_current_stream_capturing(self) -> bool:
        return getattr(_capturing, "is_so", False)


def set_capturing(is_capturing: bool) -> None:
    """Have this thread's stream be captured into a graph, or no more."""
    _capturing.is_so = is_capturing


def bytes_across() -> int:
    """Bytes that have been copied between the host and the device, one way or the other."""
    return _across[0]


@functools.cache
def register() -> tuple[torch.library.Library, ...]:
    """Let torch know the device, for the rest of this process."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, _Module())
    kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
    kernels.impl("empty.memory_format", _empty)
    kernels.impl("empty_strided", _empty_strided)
    kernels.impl("_copy_from", _copy)
    aten = torch.ops.aten
    for operator in (
        *(aten.as_strided.default, aten.view.default, aten._reshape_alias.default),
        *(aten.unfold.default, aten.set_.source_Storage_storage_offset),
    ):
        name = operator._schema.name.removeprefix("aten::")
        overload = operator._schema.overload_name
        kernels.impl(
            f"{name}.{overload}" if overload else name, functools.partial(_on_memory_of, operator)
        )
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_on_cpu, "PrivateUse1")
    return kernels, fallback
