"""Times of calls, under the names that DeepEP's test programs import."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Seconds of a call on this rank: mean, least and most.

    Args:
        fn: Called `num_warmups + num_tests` times.
        num_warmups: Calls that are not timed.
        num_tests: Calls that are; of several the first does not count.
        post_fn: Called after each of these, not timed.
        flush_l2: Argument for GPUs, no effect.
    """
    for _ in range(num_warmups):
        fn()
    seconds = []
    for _ in range(num_tests):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted), min(counted), max(counted)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Mean seconds of a call on this rank, once per name: a CPU has no kernels that could be told apart.

    Args:
        fn: Called `num_tests` times.
        kernel_names: Names, which say how many times are returned: a tuple of them, or one.
        num_tests: Timed calls; of several the first does not count.
        suppress_kineto_output: Argument for the profiler, no effect.
        trace_path: None: there is no profile to write.
        flush_l2: Argument for GPUs, no effect.
        barrier_comm_profiling: Whether ranks meet before every call.
        num_kernels_per_period: If more than 1, a list of so many equal times stands for every name.
        barrier: Function in which they meet; None leaves them apart.

    Raises:
        NotImplementedError: There is a `trace_path`.
    """
    if trace_path is not None:
        raise NotImplementedError(
            f"trace_path must be None, there is no profile of kernels; got {trace_path!r}"
        )
    meet = barrier if barrier_comm_profiling else None
    mean, _, _ = bench(fn, num_warmups=0, num_tests=num_tests, post_fn=meet, flush_l2=flush_l2)
    value = mean if num_kernels_per_period == 1 else [mean] * num_kernels_per_period
    return value if isinstance(kernel_names, str) else (value,) * len(kernel_names)


def parse_num_bytes(text: str) -> int:
    """Bytes that an argument of a program means: "512", or "512K", "64M", "1G" in powers of two.

    Raises:
        ValueError: It is something else.
    """
    unit = _UNITS.get(text[-1:].upper(), 1)
    number = text if unit == 1 else text[:-1]
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"a number of bytes, with K, M or G behind it or nothing; got {text!r}")
    return int(number) * unit
