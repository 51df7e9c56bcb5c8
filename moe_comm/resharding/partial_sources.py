"""Sources that are pending sums: reduced before any piece of them is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe_comm.resharding.module_tensors import local_tensor
from moe_comm.resharding.plan import PartialReduction, ReshardPlan

__all__ = ["reduce_partial_sources"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce_partial_sources(
    plan: ReshardPlan, src_tensors: Mapping[str, torch.Tensor], problem: str | None
) -> dict[str, torch.Tensor]:
    """Copies of the pending sums of a plan, reduced in their own dtype. The sources stay as they are.

    Collective over the ranks of each source's device mesh, in the order of the plan.

    Args:
        plan: Whose `reductions` to run.
        src_tensors: This rank's sources, by name.
        problem: What keeps this rank from taking part, or None.

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
        if isinstance(source, DTensor) and reduction.op in _OPS:
            sources.append((reduction, source))
        elif problem is None:
            problem = (
                f"{reduction.param_name} is planned as a DTensor with a pending {reduction.op}, "
                f"this rank has {type(source).__name__}"
            )
    _agree_to_reduce(sources, problem)
    return {reduction.param_name: _reduced(source, reduction) for reduction, source in sources}


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


def _reduced(source: DTensor, reduction: PartialReduction) -> torch.Tensor:
    total = local_tensor(source).clone(memory_format=torch.contiguous_format)
    for group in _groups(source, reduction):
        dist.all_reduce(total, _OPS[reduction.op], group=group)
        if reduction.op == "avg":
            # Not every backend averages.
            total /= group.size()
    return total
