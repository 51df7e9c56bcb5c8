"""State that an optimizer of torch holds beside the parameters of a model, tensor by tensor."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm.checkpoints.held_tensors import HeldTensor
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.tensors.memory import num_spanned, storage_id

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
    """State that an optimizer holds beside one of this rank's tensors.

    Args:
        offset: Elements from the first of the parameter, in whose memory the tensor lies, to its first.
        group: The parameter's group.
        state: State of the parameter: the optimizer's own dict.
        kinds: Kinds of its entries, in the order of their keys.
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

    State that the optimizer has not made of a parameter is made, as it is before a first step.

    Args:
        optimizer: Optimizer of parameters in whose memory `tensors` lie.
        tensors: Tensors of this rank.

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
    if hasattr(local, "__tensor_flatten__"):
        raise PlanError(
            f"{name}: {key} of the optimizer is a {type(local).__name__}, made of other tensors, which cannot be "
            "saved by parts"
        )
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


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operations that write into tensors do nothing, but for counters, which `undo` sets back.

    What is made to be written is zero, such as the momentum of torch 2.13's fused SGD, `torch.empty_like`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            written = args[0] if isinstance(args[0], list | tuple) else args[:1]
            if any(tensor.numel() != 1 for tensor in written):
                return args[0] if func._schema.returns else None
            for tensor in written:
                self._counters.setdefault(id(tensor), (tensor, tensor.clone()))
        made = func(*args, **kwargs or {})
        return made.zero_() if func is torch.ops.aten.empty_like.default else made

    def undo(self) -> None:
        """Set the counters back."""
        for tensor, value in self._counters.values():
            tensor.copy_(value)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make the state that it lacks, as it is before a first step, and change nothing else.

    torch 2.13's `get_optimizer_state_dict` takes a step of zeros: then the counters of Adam stand at 1, and the
    next step of AdamW is three quarters of a first one; where a gradient is there it makes nothing at all
    (`findings/torch_state_of_fresh_optimizer.sh`). Here a step makes what it starts from and writes nothing,
    beside hooks and schedulers.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    lacking = {
        id(param) for param in params if param.requires_grad and not optimizer.state.get(param)
    }
    if not lacking:
        return
    grads = [param.grad for param in params]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    unwritten = _Unwritten()
    for param in params:
        param.grad = torch.zeros_like(param) if id(param) in lacking else None
    try:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = 0.0  # SGD begins from the sum of gradient and decay
        # What an optimizer compiles (torchao's do, some Muons) refuses to run in a mode.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), unwritten:
            inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        with torch.no_grad():
            unwritten.undo()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
