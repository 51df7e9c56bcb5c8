"""Memory whose readers never return: it holds a rank in the middle of an operation.

The Linux call userfaultfd(2) hands page faults to a descriptor, and nobody answers them here.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct

import torch

# linux/userfaultfd.h
SYSTEM_CALL = {"x86_64": 323, "aarch64": 282}
USER_MODE_ONLY = 1  # what every user may have
UFFD_API = 0xAA
UFFDIO_API = 0xC018AA3F
UFFDIO_REGISTER = 0xC020AA00
MODE_MISSING = 1


def _faults_of_user() -> int:
    """A descriptor that gets the page faults of this process; negative where the kernel refuses."""
    call = SYSTEM_CALL.get(platform.machine())
    if call is None:
        return -1
    return int(ctypes.CDLL(None).syscall(call, os.O_CLOEXEC | USER_MODE_ONLY))


def can_stop_readers() -> bool:
    descriptor = _faults_of_user()
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def unreadable(num_bytes: int) -> torch.Tensor:
    """uint8 elements; a thread that reads one stands there until its process is killed."""
    descriptor = _faults_of_user()  # stays open: closing it would let readers go on
    fcntl.ioctl(descriptor, UFFDIO_API, struct.pack("QQQ", UFFD_API, 0, 0))
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    elements = torch.frombuffer(memory, dtype=torch.uint8)
    whole_pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = struct.pack("QQQQ", elements.data_ptr(), whole_pages, MODE_MISSING, 0)
    fcntl.ioctl(descriptor, UFFDIO_REGISTER, pages)
    return elements
