"""DeepEP's own test programs on CPU ranks, with nothing in them changed.

    python -m tests.helpers.deep_ep_programs CHECKOUT/tests/test_intranode.py --num-processes 2 ...

They ask for CUDA by name: devices, streams, events, NCCL. Here these names mean the CPU and Gloo,
`deep_ep` is the module of this package, and what only measures kernels calls them a few times instead of
hundreds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.overrides import TorchFunctionMode

import moe_comm.compat


def on_cpu(value: Any) -> Any:
    """The CPU for a CUDA device, whichever way it is written; anything else as it is."""
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    is_name = isinstance(value, str) and value.split(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda or is_name else value


class CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA devices are made on the CPU, inside the context."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*(on_cpu(value) for value in args), **named)


class Event:
    """`torch.cuda.Event` by the clock of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.seconds - self.seconds)


class Stream:
    """The one stream of a CPU: what was put on it has ended."""

    def synchronize(self) -> None:
        pass


def let_cuda_be_cpu() -> None:
    """Let the names that the programs use mean the CPU, in this process."""
    join = dist.init_process_group

    @functools.wraps(join)
    def join_over_gloo(backend: str, device_id: object = None, **options: Any) -> None:
        join("gloo", **options)

    @functools.wraps(torch.multiprocessing.spawn)
    def fork(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int) -> None:
        # Children of a fork have all that was done here, which spawned ones would not.
        torch.multiprocessing.start_processes(
            rank_main, args=(fn, args), nprocs=nprocs, start_method="fork"
        )

    gather = dist.all_gather_into_tensor

    def gather_rows(output: torch.Tensor, part: torch.Tensor, group: Any = None) -> None:
        # NCCL looks at the number of elements alone, Gloo wants parts one after the other.
        gather(output.view(-1, *part.shape[1:]), part, group)

    set_default_device = torch.set_default_device
    dist.all_gather_into_tensor = gather_rows
    dist.init_process_group = join_over_gloo
    torch.multiprocessing.spawn = fork
    torch.set_default_device = lambda device: set_default_device(on_cpu(device))
    torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda: None
    torch.cuda.set_device = lambda device: None


def rank_main(rank_idx: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with CudaIsCpu():
        fn(rank_idx, *args)


def shorten(*module_names: str) -> None:
    """Let the functions that time things call them as often as it takes to run through."""
    testing = importlib.import_module("deep_ep.utils.testing")
    bench, bench_kineto = testing.bench, testing.bench_kineto
    for module in map(importlib.import_module, module_names):
        module.bench = functools.partial(bench, num_warmups=0, num_tests=1)
        module.bench_kineto = functools.partial(bench_kineto, num_tests=1)


def provide_utils() -> None:
    """Let `deep_ep.utils` have the modules that these programs import of it, and nobody else."""
    utils = importlib.import_module("deep_ep.utils")
    for name in ("envs", "gate", "math", "refs", "testing"):
        module = importlib.import_module(f"tests.helpers.deep_ep_utils.{name}")
        sys.modules[f"deep_ep.utils.{name}"] = module
        setattr(utils, name, module)


def main(program: str, *arguments: str) -> None:
    """Run a program of a checkout, with its arguments."""
    moe_comm.compat.install("deep_ep")
    provide_utils()
    torch.set_num_threads(1)
    let_cuda_be_cpu()
    folder = Path(program).resolve().parent
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(folder))
    shorten("deep_ep.utils.testing", *(["utils"] if (folder / "utils.py").exists() else []))
    with CudaIsCpu():
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
