"""Sources as they are sent: pending sums reduced, quantized weights dequantized, in the plan's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe_comm.resharding.copy_services.process_group import reduce_in_place
from moe_comm.resharding.describe.mesh_layouts import REDUCTIONS
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.formats.number_formats import is_mxfp8_tensor
from moe_comm.resharding.formats.transforms import _ensure_sendable
from moe_comm.resharding.plan.reshard_plan import PartialReduction, ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp


def reduce_partial_sources(
    plan: ReshardPlan, src_tensors: Mapping[str, torch.Tensor], problem: str | None
) -> dict[str, torch.Tensor]:
    """Copies of the pending sums of a plan, reduced in their own dtype. The sources stay as they are.

    Collective over the ranks of each source's device mesh, in the order of the plan.

    Args:
        plan: Plan whose `reductions` to run.
        src_tensors: This rank's sources, by name.
        problem: Reason that keeps this rank from taking part, or None.

    Returns:
        This rank's local tensors, by name.

    Raises:
        ValueError: This rank or another one that shares a mesh with it has a problem. On every rank
            of the mesh, before anything is reduced.
    """
    if not plan.reductions:
        if problem is not None:
            raise ValueError(problem)
        return {}
    sources: list[tuple[PartialReduction, DTensor]] = []
    for reduction in plan.reductions:
        source = src_tensors.get(reduction.param_name)
        if isinstance(source, DTensor) and reduction.op in REDUCTIONS:
            sources.append((reduction, source))
        elif problem is None:
            problem = (
                f"{reduction.param_name} is planned as a DTensor with a pending {reduction.op}, "
                f"this rank has {type(source).__name__}"
            )
    _agree_to_reduce(sources, problem)
    totals: dict[str, torch.Tensor] = {}
    for reduction, source in sources:
        name = reduction.param_name
        if name not in totals:
            totals[name] = local_tensor(source).clone(memory_format=torch.contiguous_format)
        for group in _groups(source, reduction):
            reduce_in_place(totals[name], reduction.op, group)
    return totals


def _groups(source: DTensor, reduction: PartialReduction) -> Iterator[dist.ProcessGroup]:
    for mesh_dim in reduction.mesh_dims:
        yield source.device_mesh.get_group(mesh_dim)


def _agree_to_reduce(sources: list[tuple[PartialReduction, DTensor]], problem: str | None) -> None:
    """Nobody begins a reduction that another rank of its group cannot take part in."""
    seen = set()
    is_refused = problem is not None
    for reduction, source in sources:
        for group in _groups(source, reduction):
            if id(group) in seen:
                continue
            seen.add(id(group))
            flag = torch.tensor(int(is_refused), device=source._local_tensor.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            is_refused = bool(flag.item())
    if problem is not None:
        raise ValueError(problem)
    if is_refused:
        raise ValueError(
            "another rank of a pending sum's device mesh cannot take part in the refit"
        )


def piece_of(tensor: torch.Tensor, op: TransferOp) -> torch.Tensor:
    """Return the part of this rank's tensor of that name that a transfer moves, sharing its memory.

    Of pieces that were joined, all of them: views of one storage.
    """
    if op.joined is not None:
        return tensor.as_strided(op.joined.sizes, op.joined.strides, op.joined.offset)
    if op.my_view is None:
        return tensor[op.my_slice]
    try:
        return tensor.view(op.my_view)[op.my_slice]
    except RuntimeError as error:
        raise ValueError(
            f"{op.param_name}: a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} cannot be viewed as {op.my_view}"
        ) from error


class Sources:
    """This rank's sources as they can be sent: reduced, dequantized, without gradients.

    Args:
        plan: Names the MXFP8 sources to dequantize ahead.
        tensors: Tensors by name.
        reduced: Reduced tensors by name, in place of those of `tensors`.
        is_transformed: Whether a parameter is left to the transform.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        tensors: Mapping[str, torch.Tensor],
        reduced: Mapping[str, torch.Tensor],
        is_transformed: Callable[[str], bool],
    ) -> None:
        self._tensors = tensors
        self._ready: dict[str, torch.Tensor] = dict(reduced)
        self._events: dict[str, torch.cuda.Event] = {}
        names = dict.fromkeys(op.param_name for op in plan.send_ops)
        quantized = {
            name: tensors[name]
            for name in names
            if name in tensors and is_mxfp8_tensor(tensors[name]) and not is_transformed(name)
        }
        on_cuda = {name: tensor for name, tensor in quantized.items() if tensor.is_cuda}
        if on_cuda:
            self._prefetch(on_cuda)
        for name, tensor in quantized.items():
            if name not in on_cuda:
                self._ready[name] = _ensure_sendable(tensor)

    def _prefetch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Dequantize on a stream of its own, so that the first pieces leave before the last is done."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                self._ready[name] = _ensure_sendable(tensor)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
                self._events[name] = event

    def is_fresh(self, name: str) -> bool:
        """Return whether what is sent is a copy that this refit made."""
        return name in self._ready

    def given(self, name: str) -> torch.Tensor:
        """Return a transform's input: a parameter of whatever class, but of a DTensor this rank's part."""
        tensor = self._tensors[name]
        # Transforms may know the class of a parameter, but a DTensor is not theirs to cut.
        whole = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        return self._ready.get(name, whole)

    def get(self, name: str) -> torch.Tensor:
        """The tensor to send from, ready on the current stream."""
        tensor = self._ready.get(name)
        if tensor is None:
            return local_tensor(self._tensors[name])
        event = self._events.pop(name, None)
        if event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(event)
            # The allocator of the side stream must not give it away while others read it.
            tensor.record_stream(current)
        return tensor
