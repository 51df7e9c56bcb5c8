"""Implementation of expert parallelism for models of Hugging Face transformers, with this package.

transformers keeps a registry of such ways; `register` adds one, and replaces nothing. What it adds is
`TransformersExperts`, which itself needs no transformers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_comm.arguments import check_kind
from moe_comm.dispatcher.plain import TokenDispatcher
from moe_comm.dispatcher.spare_slots import (
    SpareParameters,
    balance_layers,
    check_whole,
    with_spare_slots,
)
from moe_comm.ep.autograd import QuantizedRows
from moe_comm.ep.buffer import EpBuffer
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import keeps_unbound
from moe_comm.tensors.quantization import Quantization

if TYPE_CHECKING:
    from moe_comm.replicas import ExpertBalancer

__all__ = ["TransformersExperts", "balance_experts", "register"]

_NEEDED = "transformers 5.23 or later"
_REGISTRY = "transformers.distributed.expert_parallel"


@keeps_unbound
def register(name: str = "moe_comm", *, quantization: Quantization | None = None) -> None:
    """Make `DistributedConfig(ep_implementation=name)` of transformers bring tokens to experts by moe_comm.

    Every rank calls it alike, before it loads the model. It may be called again, for other options or
    another name: a model keeps what it was loaded with.

    Args:
        name: Name to choose it by.
        quantization: Tokens are quantized on their way to the experts; the experts' outputs and all
            gradients travel as they are. None: tokens do, too.

    Raises:
        ImportError: There is no transformers, or one whose ways cannot be added to.
        TypeError: An argument is of a wrong type.
    """
    check_kind("name", name, str)
    check_kind("quantization", quantization, Quantization, is_optional=True)
    expert_parallel = _expert_parallel()

    class MoeCommEP(expert_parallel.EPImplementation):  # type: ignore[misc, name-defined]
        """Object that transformers makes for every module of experts."""

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._experts: TransformersExperts = TransformersExperts(
                self.experts_forward,
                self.num_local_experts * ep_mesh.size(),
                group=ep_mesh.get_group(),
                tp_mesh=tp_mesh if tp_mesh.size() > 1 else None,
                quantization=quantization,
            )

            experts.moe_comm_experts = self._experts  # where `balance_experts` finds it

        def __call__(self, *routed: torch.Tensor) -> torch.Tensor:
            return self._experts(*routed)

    expert_parallel.EPImplementationInterface.register(name, MoeCommEP)


@keeps_unbound
def balance_experts(model: nn.Module, num_spare_slots: int = 1, **options: Any) -> ExpertBalancer:
    """Have replicas of hot experts computed on other ranks, too. Collective.

    Every rank keeps its own experts, which optimizers and `save_pretrained` see as before, and gets slots
    for replicas of others'. The balancer fills them, from the loads that it counts.

    Args:
        model: Loaded with an `ep_implementation` of `register`, on CPUs; every rank has its experts whole:
            `ep_size` is `fsdp_size x tp_size`.
        num_spare_slots: Slots for replicas, of every rank and layer, >= 1.
        options: Options of the `ExpertBalancer`.

    Returns:
        The balancer: call `reduce_gradients` after each backward, and `step` after the optimizer's.

    Raises:
        ValueError: The model has no such experts, they are cut over further ranks, an argument of some rank
            is wrong, or ranks differ; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.

    Example:
        balancer = balance_experts(model, num_steps=100)
    """

    def layer_of(module: nn.Module) -> _BalanceableExperts | None:
        is_layer = isinstance(getattr(module, "moe_comm_experts", None), TransformersExperts)
        return _BalanceableExperts(module, model) if is_layer else None

    needed = "experts of an ep_implementation of register()"
    return balance_layers(model, layer_of, num_spare_slots, options, needed)


class _BalanceableExperts:
    """A module of experts of a model, for `balance_layers`."""

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self._module = module
        self._experts: TransformersExperts = module.moe_comm_experts  # type: ignore[assignment]
        # FSDP divides the gradients of its parameters by the number of batches.
        is_fsdp = hasattr(module, "set_gradient_divide_factor")
        config: Any = getattr(model, "config", None)
        self._divisor = float(config.distributed_config.dp_size) if is_fsdp else 1.0

    @property
    def buffer(self) -> EpBuffer:
        return self._experts.buffer

    def add_spare_slots(self, num_spare_slots: int, balancer: ExpertBalancer) -> None:
        self._experts.add_spare_slots(
            num_spare_slots, balancer, experts=self._module, divisor=self._divisor
        )


def _expert_parallel() -> Any:
    """The module of transformers with the registry."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{_NEEDED} is needed, and there is none") from error
    try:
        module = importlib.import_module(_REGISTRY)
    except ModuleNotFoundError as error:
        if error.name is None or not _REGISTRY.startswith(error.name):
            raise  # something that transformers itself needs
        module = None
    if not hasattr(module, "EPImplementationInterface"):
        raise ImportError(
            f"{_NEEDED} is needed, which has a registry of ways to bring tokens to experts; there is "
            f"{version}"
        )
    return module


class TransformersExperts:
    """The experts of one module of transformers, spread over the ranks of a group.

    Made by what `register` adds. Collective: every rank of the group makes it, and calls it in the
    same order. Rank r has the r-th of equal parts of the experts, as transformers places them. Ranks
    of a TP group share a batch, of which each sends a part of its own.

    Args:
        experts_forward: The module's own: `[M, hidden]` rows, int64 `[M, 1]` ids of local experts and
            `[M, 1]` weights to `[M, hidden]`.
        num_experts: Experts over all ranks.
        group: The ranks that share the experts.
        tp_mesh: One-dimensional, the ranks that share the batch: it may be the group, contain it or be
            contained in it. None: no other rank has this one's batch.
        quantization: As in `register`.

    Raises:
        ValueError: An argument of some rank is wrong, or those of two ranks differ; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.
    """

    @keeps_unbound
    def __init__(
        self,
        experts_forward: Callable[..., torch.Tensor],
        num_experts: int,
        *,
        group: dist.ProcessGroup | Bootstrap | None = None,
        tp_mesh: DeviceMesh | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self._experts_forward = experts_forward
        self._tp_mesh = tp_mesh
        self._replicas: SpareParameters | None = None
        self._dispatcher = TokenDispatcher(
            num_experts,
            group=group,
            quantization=quantization,
            weighted_by="combine",
        )

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of every token's experts. Collective, and so is its backward.

        Args:
            hidden_states: `[num_tokens, hidden]`, any number of tokens on every rank.
            top_k_index: Integers `[num_tokens, num_topk]`, ids of experts; -1 marks an unused choice.
            top_k_weights: `[num_tokens, num_topk]`, any float dtype; applied in float32.

        Returns:
            `[num_tokens, hidden]`, in the dtype that the experts return.
        """
        num_tokens = hidden_states.shape[0]
        if self._tp_mesh is not None:
            hidden_states, top_k_index, top_k_weights = (
                _part_of(self._tp_mesh, shared)
                for shared in (hidden_states, top_k_index, top_k_weights)
            )
        routed = self._dispatcher.dispatch(hidden_states, top_k_weights, topk_idx=top_k_index)
        rows = routed.tokens
        if isinstance(rows, QuantizedRows):
            rows = rows.dequantize()  # once: each look at quantized rows does it anew
        run = self._run_experts
        if self._replicas is not None:
            run = functools.partial(self._replicas.run_too, run)
        expert_out = run(rows, routed.num_tokens_per_expert)
        y = self._dispatcher.combine(expert_out, routed)
        return y if self._tp_mesh is None else _whole_of(self._tp_mesh, y, num_tokens)

    @property
    def buffer(self) -> EpBuffer:
        """Buffer that moves the tokens."""
        return self._dispatcher.buffer

    def add_spare_slots(
        self, num_spare_slots: int, balancer: ExpertBalancer, *, experts: nn.Module, divisor: float
    ) -> None:
        """Compute replicas too from now on, and add the layer to the balancer. Collective.

        Args:
            num_spare_slots: Slots for replicas, of every rank, behind those of its own experts.
            balancer: Balancer of this communicator.
            experts: Module whose forward this object calls; its parameters keep its own experts.
            divisor: Number that gradients of its parameters are divided by, beside what is added up
                here.

        Raises:
            ValueError: A parameter does not have all of this rank's experts; on every rank.
        """
        buffer = self.buffer
        num_own = buffer.num_local_experts

        buffer.communicator.check_together(
            lambda: check_whole(experts, num_own, "ep_size = fsdp_size x tp_size"),
            "add_spare_slots",
        )
        self._replicas = SpareParameters(experts, num_own, num_spare_slots, divisor)
        self._dispatcher = TokenDispatcher(
            buffer.config.num_experts,
            buffer=with_spare_slots(buffer, num_spare_slots),
            quantization=self._dispatcher.quantization,
            weighted_by="combine",
        )
        balancer.add_layer(self.buffer, self._replicas.weights(), num_kept_slots=num_own)

    def __deepcopy__(self, memo: dict[int, object]) -> TransformersExperts:
        """Itself, as transformers' own calls it in a copy of a model, too."""
        return self

    def _run_experts(self, rows: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """The experts' outputs, unweighted, in the order of the rows."""
        num_rows = rows.shape[0]
        local_experts = torch.arange(num_tokens_per_expert.shape[0], device=rows.device)
        expert_ids = local_experts.repeat_interleave(
            num_tokens_per_expert.to(rows.device), output_size=num_rows
        )
        # Experts never get no row at all: FSDP sums their gradients over ranks, so that each has to
        # have one. What is compiled does not know how many there are, and always has one more.
        has_spare_row = torch.compiler.is_compiling() or num_rows == 0
        if has_spare_row:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            expert_ids = torch.cat([expert_ids, local_experts[-1:]])
        weights = rows.new_ones(expert_ids.shape[0], 1)
        expert_out = self._experts_forward(rows, expert_ids[:, None], weights)
        return expert_out[:num_rows] if has_spare_row else expert_out


def _part_of(tp_mesh: DeviceMesh, shared: torch.Tensor) -> torch.Tensor:
    """This rank's part of what its TP group shares; the backward gathers the parts' gradients."""
    replicated = DTensor.from_local(shared, tp_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(tp_mesh, [Shard(0)]).to_local()


def _whole_of(tp_mesh: DeviceMesh, part: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`[num_tokens, hidden]` of the parts of a TP group."""
    hidden = part.shape[1]
    shape = torch.Size((num_tokens, hidden))
    sharded = DTensor.from_local(part, tp_mesh, [Shard(0)], shape=shape, stride=(hidden, 1))
    return sharded.full_tensor()
