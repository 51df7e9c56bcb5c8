"""Replicas of the experts of Megatron's MoE layers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_comm.dispatcher.megatron_manager import MegatronManager
from moe_comm.dispatcher.spare_slots import balance_layers
from moe_comm.ep.buffer import EpBuffer
from moe_comm.peers.missed_calls import keeps_unbound

if TYPE_CHECKING:
    from moe_comm.replicas import ExpertBalancer


@keeps_unbound
def balance_experts(model: nn.Module, num_spare_slots: int = 1, **options: Any) -> ExpertBalancer:
    """Have replicas of hot experts computed on other ranks, too. Collective.

    Every rank keeps its own experts, which optimizers and checkpoints see as before. Behind them it gets
    slots for replicas of others', which the balancer fills, from the loads that it counts: modules of
    Megatron's like its own, which belong to no other module.

    Args:
        model: Built over `MegatronTokenDispatcher` or `MegatronManager`, on CPUs, with experts that are a list
            (`SequentialMLP`) and lie on one rank (`expert_tensor_parallel_size=1`). Its parameters stay
            where they are: call it after the wrapper and the optimizer have been made.
        num_spare_slots: Slots for replicas, of every rank and layer, >= 1.
        options: Options of the `ExpertBalancer`.

    Returns:
        The balancer: call `reduce_gradients` after each backward, before gradients are reduced over data
        parallel ranks, and `step` after the optimizer's.

    Raises:
        ValueError: The model has no such layers, or others, an argument of some rank is wrong, or ranks differ;
            on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.

    Example:
        balancer = balance_experts(model, num_steps=100)
    """
    needed = "MoE layers over MegatronTokenDispatcher or MegatronManager"
    return balance_layers(model, _layer_of, num_spare_slots, options, needed)


def _layer_of(module: nn.Module) -> _Layer | None:
    manager = getattr(getattr(module, "token_dispatcher", None), "_comm_manager", None)
    return _Layer(module) if isinstance(manager, MegatronManager) else None


class _Layer:
    """A `MoELayer` of Megatron, for `balance_layers`."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._manager: MegatronManager = layer.token_dispatcher._comm_manager
        self._own: list[list[nn.Parameter]] = []
        self._spare: list[list[nn.Parameter]] = []
        self._weights: list[list[torch.Tensor]] = []

    @property
    def buffer(self) -> EpBuffer:
        return self._manager.buffer

    def add_spare_slots(self, num_spare_slots: int, balancer: ExpertBalancer) -> None:
        """Have the experts compute the rows of replicas, too, and the balancer fill these. Collective."""
        num_own = self.buffer.num_local_experts
        self.buffer.communicator.check_together(self._check, "add_spare_slots")
        self._manager.add_spare_slots(num_spare_slots)
        experts = self._layer.experts
        spare = _twin(experts)
        spare.num_local_experts = num_spare_slots
        spare.local_experts = nn.ModuleList(
            _twin(experts.local_experts[0]) for _ in range(num_spare_slots)
        )
        run_own = experts.forward

        def run_all(
            rows: torch.Tensor, tokens_per_slot: torch.Tensor, probs: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            num_own_rows = int(tokens_per_slot[:num_own].sum())
            own, bias = run_own(
                rows[:num_own_rows], tokens_per_slot[:num_own], probs[:num_own_rows]
            )
            others, _ = spare(rows[num_own_rows:], tokens_per_slot[num_own:], probs[num_own_rows:])
            return torch.cat([own, others]), bias

        experts.forward = run_all
        self._own, self._spare = (
            [
                list(of_slots)
                for of_slots in zip(
                    *(each.parameters() for each in module.local_experts), strict=True
                )
            ]
            for module in (experts, spare)
        )
        self._weights = [
            [parameter.detach()[None] for parameter in (*own, *others)]
            for own, others in zip(self._own, self._spare, strict=True)
        ]
        balancer.add_layer(
            self.buffer, self._weights, num_kept_slots=num_own, gradients=self._take_gradients
        )

    def _check(self) -> str:
        layer, manager = self._layer, self._manager
        num_own = self.buffer.num_local_experts
        tp_size = layer.token_dispatcher.tp_size
        if tp_size != 1:
            raise ValueError(
                f"experts must lie on one rank each, got {tp_size} tensor parallel ranks"
            )
        if manager.quantization is not None:
            raise ValueError(f"rows must not be quantized, got {manager.quantization}")
        if layer.config.gradient_accumulation_fusion:
            raise ValueError("gradient_accumulation_fusion must be False, got True")
        held = getattr(layer.experts, "local_experts", None)
        if not isinstance(held, nn.ModuleList) or len(held) != num_own:
            raise ValueError(
                f"experts must be {num_own} modules in a list, as those of SequentialMLP, got "
                f"{type(layer.experts).__name__}"
            )
        return f"{num_own} experts of {[name for name, _ in held[0].named_parameters()]}"

    def _take_gradients(self) -> list[list[torch.Tensor]]:
        """Gradients of all slots, from where the framework has them; those of replicas are handed over, and gone."""
        found = []
        for own, others, weights in zip(self._own, self._spare, self._weights, strict=True):
            if any(
                parameter.data_ptr() != weight.data_ptr()
                for parameter, weight in zip(own, weights, strict=False)
            ):
                raise ValueError(
                    "a parameter of an expert has moved since balance_experts, which comes after what moves "
                    "parameters: the wrapper and the optimizer"
                )
            if own[0].requires_grad:
                gradients = [_gradient_of(parameter) for parameter in own]
                for parameter in others:
                    gradient, parameter.grad = parameter.grad, None
                    like = gradients[0]
                    gradients.append(
                        torch.zeros_like(like) if gradient is None else gradient.to(like.dtype)
                    )
                found.append([gradient[None] for gradient in gradients])
        return found


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Gradient of an expert of this rank: the one that Megatron's wrapper accumulates, else autograd's."""
    main_grad = getattr(parameter, "main_grad", None)
    if isinstance(main_grad, torch.Tensor):
        return main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _twin(module: Any) -> Any:
    """Make a module of the same kind, options and process groups, with parameters of its own, which are zero."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None
        if parameter is None
        else nn.Parameter(torch.zeros_like(parameter), requires_grad=parameter.requires_grad)
        for name, parameter in module._parameters.items()
    }
    twin._modules = {name: _twin(child) for name, child in module._modules.items()}
    return twin
