"""An `EPImplementation` of Hugging Face transformers: the experts of any of its models, over this package.

`register` puts it into the registry that transformers keeps for such implementations; nothing of
transformers is replaced. `TransformersExperts` does the work, and needs no transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_comm.arguments import check_kind, shown
from moe_comm.autograd import QuantizedRows
from moe_comm.dispatcher.plain import TokenDispatcher
from moe_comm.quantization import Quantization

__all__ = ["TransformersExperts", "register"]

FIRST_VERSION = "5.23"


def register(
    name: str = "moe_comm", *, quantization: Quantization | None = None, backend: str = "auto"
) -> None:
    """Make `DistributedConfig(ep_implementation=name)` of transformers bring tokens to experts by moe_comm.

    Every rank calls it alike, before the model is loaded. It may be called again, with other options
    or another name; models keep what they were loaded with.

    Args:
        name: To be chosen by.
        quantization: Tokens are quantised on their way to the experts; what experts return and
            gradients are not. None: they travel as they are.
        backend: As in `Communicator`.

    Raises:
        ImportError: There is no transformers, or one that has no registry of such implementations.
        TypeError: An argument is of a wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {shown(name)}")
    check_kind("quantization", quantization, Quantization, is_optional=True)
    expert_parallel = _expert_parallel()

    class MoeCommEP(expert_parallel.EPImplementation):  # type: ignore[misc, name-defined]
        """What transformers makes one of for every experts module."""

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._exchange = TransformersExperts(
                self.experts_forward,
                self.num_local_experts,
                ep_mesh,
                tp_mesh,
                quantization=quantization,
                backend=backend,
            )

        def __call__(
            self,
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
        ) -> torch.Tensor:
            return self._exchange(hidden_states, top_k_index, top_k_weights)

    expert_parallel.EPImplementationInterface.register(name, MoeCommEP)


def _expert_parallel() -> Any:
    """The module of transformers that has the registry."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"transformers {FIRST_VERSION} or later is needed, there is none"
        ) from error
    try:
        module = importlib.import_module("transformers.distributed.expert_parallel")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformers"):
            raise
        module = None
    if not hasattr(module, "EPImplementationInterface"):
        raise ImportError(
            f"transformers {FIRST_VERSION} or later is needed, which takes implementations of expert "
            f"parallelism; there is {version}"
        )
    return module


class TransformersExperts:
    """The experts of a module of transformers, spread over the ranks of a mesh.

    Collective over `ep_mesh`: every rank makes it and calls it in the same order. Experts are placed as
    transformers does, those of rank r being the r-th equal part. Each rank of a TP group, which shares
    its batch, sends a part of it of its own.

    Args:
        experts_forward: The module's own, `(rows, local expert ids, weights) -> rows`.
        num_local_experts: On this rank; the same on all.
        ep_mesh: One-dimensional, of the ranks that share the experts.
        tp_mesh: One-dimensional, of the ranks with one batch; it may be, contain or be contained in
            `ep_mesh`, or be of this rank alone.
        quantization: As in `register`.
        backend: As in `Communicator`.

    Raises:
        ValueError: An argument of some rank is wrong, or those of two ranks differ; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.
    """

    def __init__(
        self,
        experts_forward: Callable[..., torch.Tensor],
        num_local_experts: int,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        *,
        quantization: Quantization | None = None,
        backend: str = "auto",
    ) -> None:
        self._experts_forward = experts_forward
        self._tp_mesh = tp_mesh
        self._dispatcher = TokenDispatcher(
            num_local_experts * ep_mesh.size(),
            group=ep_mesh.get_group(),
            quantization=quantization,
            weighted_by="combine",
            backend=backend,
        )

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of every token's experts. Collective; differentiable, and so collective again.

        Args:
            hidden_states: `[num_tokens, hidden]`, of this rank; any number of tokens.
            top_k_index: Integers `[num_tokens, num_topk]`, of all experts.
            top_k_weights: `[num_tokens, num_topk]`, any float dtype; applied in float32 by combine.

        Returns:
            `[num_tokens, hidden]`, in the dtype of what the experts return.
        """
        num_tokens = hidden_states.shape[0]
        has_peers = self._tp_mesh.size() > 1
        if has_peers:
            hidden_states, top_k_index, top_k_weights = (
                self._own_part(whole) for whole in (hidden_states, top_k_index, top_k_weights)
            )
        routed = self._dispatcher.dispatch(hidden_states, top_k_weights, topk_idx=top_k_index)
        rows = routed.tokens
        if isinstance(rows, QuantizedRows):
            rows = rows.dequantize()  # once: each look at quantised rows does it anew
        expert_out = self._run_experts(rows, routed.num_tokens_per_expert)
        y = self._dispatcher.combine(expert_out, routed)
        return self._whole(y, num_tokens) if has_peers else y

    def _run_experts(self, rows: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """The experts' outputs, unweighted, in the order of the rows."""
        if rows.shape[0] == 0:
            # FSDP adds the experts' gradients over ranks, which all have to have one.
            some = rows.sum(dim=0, keepdim=True)
            expert_ids = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
            return self._experts_forward(some, expert_ids, torch.ones_like(some[:, :1]))[:0]
        local_experts = torch.arange(num_tokens_per_expert.shape[0])
        expert_ids = local_experts.repeat_interleave(
            num_tokens_per_expert, output_size=rows.shape[0]
        )[:, None]
        return self._experts_forward(
            rows, expert_ids, torch.ones_like(expert_ids, dtype=rows.dtype)
        )

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of what its TP group shares; the backward gathers the gradients."""
        shared = DTensor.from_local(whole, self._tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self._tp_mesh, [Shard(0)]).to_local()

    def _whole(self, part: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """`[num_tokens, hidden]` from the parts of the TP group."""
        width = part.shape[1]
        return DTensor.from_local(
            part,
            self._tp_mesh,
            [Shard(0)],
            shape=torch.Size((num_tokens, width)),
            stride=(width, 1),
        ).full_tensor()
