"""torchtitan's dispatcher shape: `BaseEPTokenDispatcher` of torchtitan 0.3.

Where torchtitan is installed its base classes are used, `moe_comm_dispatcher` is registered as an
override of its dispatchers, and `SelectiveAC` as a policy that saves what was communicated. Without it
the same dispatcher stands on a base of this module.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from moe_comm.arguments import as_dense, as_int
from moe_comm.dispatcher.spare_slots import (
    SpareParameters,
    balance_layers,
    check_whole,
    with_spare_slots,
)
from moe_comm.ep.autograd import SAVED_OPERATORS, combine, dispatch
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.config import Capacity
from moe_comm.ep.group_buffers import GroupBuffers, group_buffers
from moe_comm.ep.handles import DispatchHandle
from moe_comm.peers.bootstrap import Bootstrap, RankThreads
from moe_comm.peers.missed_calls import GATHER, Telling, keep, keeps_unbound

if TYPE_CHECKING:
    from moe_comm.replicas import ExpertBalancer

__all__ = ["DispatchMetadata", "TorchtitanTokenDispatcher", "balance_experts"]


class _Configurable:
    """Stands in for torchtitan's `Configurable`: a Config that builds its owner."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        """Configuration that every dispatcher of torchtitan has."""

        num_experts: int
        top_k: int
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            """The dispatcher."""
            return self._owner(config=dataclasses.replace(self))

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls

    def __init__(self, config: Any) -> None:
        self.num_experts: int = config.num_experts
        self.top_k: int = config.top_k
        self.ep_mesh: Any = None


def _torchtitan(module: str) -> Any:
    """A module of torchtitan, or None where torchtitan is not installed."""
    if importlib.util.find_spec("torchtitan") is None:
        return None
    return importlib.import_module(f"torchtitan.{module}")


_dispatchers = _torchtitan("models.common.token_dispatcher")
_Base: Any = _Configurable if _dispatchers is None else _dispatchers.BaseEPTokenDispatcher


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DispatchMetadata:
    """State that one dispatch leaves for its combine; torchtitan hands it through.

    Args:
        handle: Handle of the dispatch.
        topk_scores: float32 `[num_tokens, num_topk]`, applied in combine.
        num_dropped_per_expert: int64 `[num_local_experts]` on the host: rows beyond the capacity.
        num_required_rows: int64 without dimensions: rows that dropping nothing would have taken.
    """

    handle: DispatchHandle
    topk_scores: torch.Tensor
    num_dropped_per_expert: torch.Tensor
    num_required_rows: torch.Tensor


class TorchtitanTokenDispatcher(_Base):  # type: ignore[misc]
    """torchtitan's dispatch and combine on `EpBuffer`; differentiable and compilable.

    Scores are applied in combine, in float32, after the experts. Tokens may differ in number between
    ranks. It holds no state of a call. Built by `Config(...).build()`, wired by `wire_meshes`.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):  # type: ignore[misc]
        """Fields beyond `num_experts` and `top_k`.

        Args:
            non_blocking_capacity_factor: Share, in (0, 1], of the worst case
                `num_tokens * num_ranks * min(num_local_experts, top_k)` that is the fixed number of
                rows of the result, plus room for padding; rows beyond it are dropped and counted in
                the metadata. 1 drops nothing. None: as many rows as arrive.
            pad_multiple: Rows of every local expert are padded with zero rows to a multiple of this,
                and the counts are of padded rows. None: 1.
            hidden_dim: Checked against x where given.
            num_max_tokens_per_rank: Checked against x where given. Nothing is sized by it.
        """

        non_blocking_capacity_factor: float | None = None
        pad_multiple: int | None = None
        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None

    Config.__init__ = keeps_unbound(Config.__init__)  # type: ignore[method-assign]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        factor = config.non_blocking_capacity_factor
        with Telling(keep, GATHER):  # who are about to make the buffer
            if factor is not None and not 0 < float(factor) <= 1:
                raise ValueError(f"non_blocking_capacity_factor must be in (0, 1], got {factor}")
            if config.pad_multiple is not None:
                as_int("pad_multiple", config.pad_multiple, 1, (1 << 31) - 1)
            if config.hidden_dim is not None:
                as_int("hidden_dim", config.hidden_dim, 1)
            if config.num_max_tokens_per_rank is not None:
                as_int("num_max_tokens_per_rank", config.num_max_tokens_per_rank, 0)
        self.non_blocking_capacity_factor: float | None = factor
        self.pad_multiple: int = config.pad_multiple or 1
        self.hidden_dim: int | None = config.hidden_dim
        self.num_max_tokens_per_rank: int | None = config.num_max_tokens_per_rank
        self._group_buffers: GroupBuffers | None = None
        self._buffer: EpBuffer | None = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Take the expert-parallel mesh and make the buffer. Collective over the mesh.

        Args:
            ep_mesh: One-dimensional `DeviceMesh`; None for experts that are all on this rank.
        """
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Make the buffer, or find the one that the layers of this mesh share."""
        mesh = self.ep_mesh
        self._wire(RankThreads(1)[0] if mesh is None else mesh.get_group())

    def wire_group(self, group: dist.ProcessGroup | Bootstrap | None) -> None:
        """Like `wire_meshes`, for callers that have a group and no mesh."""
        self._wire(group)

    def _wire(self, group: dist.ProcessGroup | Bootstrap | None) -> None:
        self._group_buffers = group_buffers(group)
        self._buffer = self._group_buffers.get_together(type(self).__name__, self.num_experts)

    @property
    def buffer(self) -> EpBuffer:
        """Buffer that moves the tokens; RuntimeError before `wire_meshes`."""
        return self._wired()

    def add_spare_slots(self, num_spare_slots: int) -> None:
        """Have every rank get rows for so many replicas too, behind those of its own experts. Collective.

        The buffer is this dispatcher's own from now on.
        """
        self._buffer = with_spare_slots(self._wired(), num_spare_slots)

    @rejects_unbound("dispatch", lambda args, _: args[0]._buffer)
    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803 - torchtitan's names, with its shape suffixes
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchMetadata]:
        """Send every token to the ranks of its experts. Collective.

        Args:
            x_TD: `[num_tokens, hidden]`.
            topk_scores_TK: `[num_tokens, top_k]`, any float dtype.
            topk_expert_ids_TK: Integers `[num_tokens, top_k]`; -1 marks an unused choice.
            num_local_tokens_per_expert_E: Not needed: counts travel with the operation.

        Returns:
            Rows by local expert; int64 `[num_local_experts]` rows of every local expert, padding
            included; metadata for `combine`.
        """
        buffer = self._wired()
        with Telling(buffer.reject, "dispatch"):
            self._check(x_TD, topk_scores_TK, topk_expert_ids_TK)
        capacity = self._capacity(x_TD.shape[0], topk_expert_ids_TK.shape[1])
        result = dispatch(
            x_TD,
            topk_expert_ids_TK.to(torch.int64),
            buffer=buffer,
            expert_alignment=self.pad_multiple,
            capacity=capacity,
        )
        metadata = DispatchMetadata(
            handle=result.handle,
            topk_scores=topk_scores_TK.float(),
            num_dropped_per_expert=result.num_dropped_per_expert,
            num_required_rows=result.num_required_rows,
        )
        num_rows_per_expert = result.expert_offsets.diff().to(torch.int64)
        return result.x, num_rows_per_expert, metadata

    @rejects_unbound("combine", lambda args, _: args[0]._buffer)
    def combine(
        self,
        routed_output_RD: torch.Tensor,  # noqa: N803
        metadata: DispatchMetadata,
        x_TD: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Multiply the experts' outputs by their scores, bring them back and sum them. Collective.

        Args:
            routed_output_RD: `[M, hidden]`, as many rows as dispatch returned.
            metadata: Metadata of that dispatch.
            x_TD: Not needed: the metadata knows the tokens.

        Returns:
            `[num_tokens, hidden]`.
        """
        buffer = self._wired()
        with Telling(buffer.reject, "combine"):
            if not isinstance(metadata, DispatchMetadata):
                raise TypeError(f"metadata must be DispatchMetadata, got {type(metadata).__name__}")
        return combine(
            routed_output_RD,
            metadata.handle,
            buffer=buffer,
            topk_weights=metadata.topk_scores,
        )

    def _wired(self) -> EpBuffer:
        if self._buffer is None:
            raise RuntimeError("call wire_meshes before dispatch and combine")
        return self._buffer

    def _check(
        self,
        x_TD: torch.Tensor,  # noqa: N803
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
    ) -> None:
        """Raise what is wrong with the input beyond what the buffer checks."""
        named = ("x_TD", x_TD), ("topk_scores_TK", topk_scores_TK), ("topk_ids", topk_expert_ids_TK)
        for name, tensor in named:
            as_dense(name, tensor)
            if tensor.dim() != 2:
                raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(tensor.shape)}")
            if tensor.is_complex():
                raise TypeError(f"{name} must be of a real dtype, got {tensor.dtype}")
        if topk_expert_ids_TK.is_floating_point():
            raise ValueError(
                f"topk_expert_ids_TK must hold integers, got {topk_expert_ids_TK.dtype}"
            )
        if topk_scores_TK.shape != topk_expert_ids_TK.shape:
            raise ValueError(
                f"topk_scores_TK {tuple(topk_scores_TK.shape)} and topk_expert_ids_TK "
                f"{tuple(topk_expert_ids_TK.shape)} must have one shape"
            )
        num_tokens, hidden = x_TD.shape
        most_tokens = self.num_max_tokens_per_rank
        if most_tokens is not None and num_tokens > most_tokens:
            raise ValueError(
                f"x_TD has {num_tokens} tokens, num_max_tokens_per_rank is {most_tokens}"
            )
        if self.hidden_dim is not None and hidden != self.hidden_dim:
            raise ValueError(f"x_TD has hidden {hidden}, hidden_dim is {self.hidden_dim}")

    def _capacity(self, num_tokens: int, num_topk: int) -> Capacity | None:
        """The rows of the result where they are fixed. The same formula as torchtitan's, plus padding."""
        if self.non_blocking_capacity_factor is None:
            return None
        buffer = self._wired()
        most_local = min(buffer.num_local_experts, num_topk)
        worst = num_tokens * buffer.communicator.num_ranks * most_local
        num_rows = int(worst * self.non_blocking_capacity_factor)
        # An expert's rows grow by less than pad_multiple.
        num_rows += buffer.num_local_experts * (self.pad_multiple - 1)
        num_rows += -num_rows % self.pad_multiple
        return Capacity(num_rows=num_rows, on_overflow="drop")


@keeps_unbound
def balance_experts(model: nn.Module, num_spare_slots: int = 1, **options: Any) -> ExpertBalancer:
    """Have replicas of hot experts computed on other ranks, too. Collective.

    Every rank keeps its own experts, which optimizers and checkpoints see as before, and gets slots
    for replicas of others'. The balancer fills them, from the loads that it counts.

    Args:
        model: Parallelized over `TorchtitanTokenDispatcher`, on CPUs; every rank has its experts whole: no FSDP
            of more than one rank around experts, no `dp_replicate`.
        num_spare_slots: Slots for replicas, of every rank and layer, >= 1.
        options: Options of the `ExpertBalancer`.

    Returns:
        The balancer: call `reduce_gradients` after each backward, and `step` after the optimizer's.

    Raises:
        ValueError: The model has no such layers, their experts are cut over further ranks, an argument of some
            rank is wrong, or ranks differ; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.

    Example:
        balancer = balance_experts(model, num_steps=100)
    """
    needed = "routed experts over TorchtitanTokenDispatcher"
    return balance_layers(model, _layer_of, num_spare_slots, options, needed)


def _layer_of(module: nn.Module) -> _Layer | None:
    if not isinstance(getattr(module, "token_dispatcher", None), TorchtitanTokenDispatcher):
        return None
    layer = _Layer(module)
    layer.buffer  # noqa: B018 - raises where it has not been wired
    return layer


class _Layer:
    """Routed experts of torchtitan, for `balance_layers`."""

    def __init__(self, routed_experts: Any) -> None:
        self._experts: nn.Module = routed_experts.inner_experts
        self._dispatcher: TorchtitanTokenDispatcher = routed_experts.token_dispatcher

    @property
    def buffer(self) -> EpBuffer:
        return self._dispatcher.buffer

    def add_spare_slots(self, num_spare_slots: int, balancer: ExpertBalancer) -> None:
        """Have the experts compute the rows of replicas, too, and the balancer fill these. Collective."""
        experts, num_own = self._experts, self.buffer.num_local_experts
        self.buffer.communicator.check_together(
            lambda: check_whole(experts, num_own, "ep = dp_shard x cp x tp, dp_replicate = 1"),
            "add_spare_slots",
        )
        self._dispatcher.add_spare_slots(num_spare_slots)
        replicas = SpareParameters(experts, num_own, num_spare_slots)
        experts.forward = functools.partial(replicas.run_too, experts.forward)
        balancer.add_layer(self.buffer, replicas.weights(), num_kept_slots=num_own)


if _dispatchers is not None:
    _config = _torchtitan("config")
    _checkpointing = _torchtitan("distributed.activation_checkpoint")

    @_config.override(  # type: ignore[untyped-decorator]
        target=_dispatchers.BaseEPTokenDispatcher.Config,
        description="Dispatch and combine by moe_comm.",
    )
    def moe_comm_dispatcher(cfg: Any, **fields: Any) -> Any:
        """Replace a dispatcher's configuration; fields that both have are kept.

        Activated by `--override.imports moe_comm.dispatcher.torchtitan.moe_comm_dispatcher`.

        Args:
            cfg: Configuration of any expert-parallel dispatcher of torchtitan.
            fields: Fields of `TorchtitanTokenDispatcher.Config` to set.
        """
        return _config.derive(cfg, TorchtitanTokenDispatcher.Config, **fields)

    class SelectiveAC(_checkpointing.SelectiveAC):  # type: ignore[misc, name-defined]
        """torchtitan's selective activation checkpointing, which saves what was communicated too."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(_checkpointing.SelectiveAC.Config):  # type: ignore[misc, name-defined]
            """Configuration like torchtitan's."""

        def get_save_ops(self) -> set[Any]:
            """Operators whose outputs are not recomputed."""
            return set(super().get_save_ops()) | set(SAVED_OPERATORS)

    @_config.override(  # type: ignore[untyped-decorator]
        target=_checkpointing.SelectiveAC.Config,
        description="Selective checkpointing that saves what moe_comm communicated.",
        exact=True,
    )
    def moe_comm_selective_ac(cfg: Any) -> Any:
        """Replace the selective checkpointing policy; activated like `moe_comm_dispatcher`."""
        return _config.derive(cfg, SelectiveAC.Config)

    __all__ += ["SelectiveAC", "moe_comm_dispatcher", "moe_comm_selective_ac"]
