"""What an optimizer of torch holds beside the parameters of a model, tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from moe_comm.checkpoints.held_tensors import HeldTensor
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.tensors.memory import num_spanned, storage_id

__all__ = ["Beside", "StateKind", "states_beside"]

Role = Literal["like", "scalar", "value"]


class StateKind(NamedTuple):
    """One entry of an optimizer's state of a parameter: its key, what it is, and its dtype if it is a tensor.

    `role` is "like" for a tensor that is cut as the parameter is, "scalar" for one of a single element, and
    "value" for a number of Python.
    """

    key: str
    role: Role
    dtype: str


@dataclasses.dataclass(frozen=True)
class Beside:
    """What an optimizer holds beside one of this rank's tensors.

    Args:
        offset: Elements from the first of the parameter, in whose memory the tensor lies, to its first.
        group: The parameter's group.
        state: Of the parameter: the optimizer's own dict.
        kinds: Of its entries, in the order of their keys.
    """

    offset: int
    group: dict[str, Any]
    state: dict[str, Any]
    kinds: tuple[StateKind, ...]

    def view_like(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a state's tensor that stands beside this rank's tensor."""
        state = local_tensor(self.state[key])
        offset = int(state.storage_offset()) + self.offset
        return state.as_strided(tensor.shape, tensor.stride(), offset)

    @property
    def options(self) -> dict[str, Any]:
        """The group without its parameters: learning rate, betas and the like."""
        return {
            key: value for key, value in self.group.items() if key not in ("params", "param_names")
        }


def states_beside(
    optimizer: torch.optim.Optimizer, tensors: Sequence[HeldTensor]
) -> list[Beside | None]:
    """Return what an optimizer holds beside each of this rank's tensors; None where it is no parameter of it.

    A state that the optimizer has not made is made, by a step with gradients and a learning rate of zero, as
    `torch.distributed.checkpoint.state_dict` does.

    Args:
        optimizer: Of parameters in whose memory `tensors` lie.
        tensors: Of this rank.

    Raises:
        PlanError: A parameter's state is cut in another way than the parameter, or a parameter is none of
            the tensors.
    """
    _make_state(optimizer)
    places: dict[int, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            places.setdefault(storage_id(local_tensor(param)), []).append((param, group))
    beside: list[Beside | None] = []
    found: set[int] = set()
    for name, tensor, _, _ in tensors:
        param, group = _owner_of(tensor, places)
        if param is None:
            beside.append(None)
            continue
        found.add(id(param))
        state = optimizer.state.get(param, {})
        offset = int(tensor.storage_offset()) - int(local_tensor(param).storage_offset())
        kinds = (_kind_of(name, key, state[key], param) for key in sorted(state))
        known = tuple(kind for kind in kinds if kind is not None)
        beside.append(Beside(offset, group, state, known))
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            if id(param) not in found:
                raise PlanError(
                    f"parameter {number} of a group of the optimizer, of shape {tuple(param.shape)}, is none "
                    "that the model describes"
                )
    return beside


def _owner_of(
    tensor: torch.Tensor, places: dict[int, list[tuple[torch.Tensor, dict[str, Any]]]]
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """The parameter in whose memory a tensor lies, and its group; None where there is none."""
    first = int(tensor.storage_offset())
    for param, group in places.get(storage_id(tensor), ()):
        local = local_tensor(param)
        if not tensor.numel():
            return param, group
        start = int(local.storage_offset())
        if start <= first and first + num_spanned(tensor) <= start + num_spanned(local):
            return param, group
    return None, {}


def _kind_of(name: str, key: str, value: object, param: torch.Tensor) -> StateKind | None:
    """Return what an entry of a state is; None for an empty one."""
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return StateKind(key, "value", "")
    if not isinstance(value, torch.Tensor):
        raise PlanError(
            f"{name}: {key} of the optimizer is a {type(value).__name__}, no tensor or number"
        )
    local, own = local_tensor(value), local_tensor(param)
    is_cut_alike = (
        not isinstance(value, DTensor)
        or not isinstance(param, DTensor)
        or (value.placements == param.placements and value.device_mesh == param.device_mesh)
    )
    if local.shape == own.shape and is_cut_alike:
        if local.stride() != own.stride():
            raise PlanError(
                f"{name}: {key} of the optimizer has strides {local.stride()}, its parameter "
                f"{own.stride()}"
            )
        return StateKind(key, "like", str(local.dtype))
    if local.numel() == 1:
        return StateKind(key, "scalar", str(local.dtype))
    raise PlanError(
        f"{name}: {key} of the optimizer has shape {tuple(local.shape)}, and its parameter "
        f"{tuple(own.shape)}: only what is cut as the parameter is, and single numbers, can be saved by "
        "parts"
    )


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make the state that its first step would make, and change nothing else."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or any(param.grad is not None for param in params):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for param in params:
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
