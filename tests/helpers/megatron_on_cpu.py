"""Megatron's own token dispatchers on CPU ranks, and one expert layer around any of them.

Nothing of Megatron's source is changed. It asks torch.cuda for streams and for the current device even
where every tensor is on the CPU; `on_cpu` answers, and patches nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens `[..., hidden]`, routing map and probs `[num_tokens, num_experts]` of a rank."""


class _Stream:
    """The one stream of a CPU: what was put on it has ended."""

    def wait_stream(self, stream: _Stream) -> None:
        del stream

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_THE_STREAM = _Stream()


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's function, for tensors that are there already: it heeds `as_numpy` on GPUs only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _fork_nothing(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Do nothing for attention, which asks for a generator of CUDA around its dropout, even of probability 0."""
    return contextlib.nullcontext()


_zeros = torch.zeros


def _zeros_on_cpu(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.zeros` for what release 0.19 makes on the current GPU: the flag of a manager."""
    is_cuda = device is not None and torch.device(device).type == "cuda"
    return _zeros(*size, device="cpu" if is_cuda else device, **options)


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextlib.contextmanager
def on_cpu() -> Iterator[Any]:
    """Megatron's module of token dispatchers, usable with CPU tensors inside the context."""
    module = _module("megatron.core.transformer.moe.token_dispatcher")
    utilities = _module("megatron.core.transformer.moe.moe_utils")
    generators = _module("megatron.core.tensor_parallel.random")
    # `torch.compile` around the flex dispatcher's preprocessing changes no result.
    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(torch.cuda, "Stream", return_value=_THE_STREAM),
        mock.patch.object(torch.cuda, "current_stream", return_value=_THE_STREAM),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch, "zeros", _zeros_on_cpu),
        mock.patch.object(module, "maybe_move_tensor_to_cpu", _move_to_cpu),
        # The router asks for it, and without Transformer Engine release 0.16 leaves it undefined.
        mock.patch.object(utilities, "te_general_gemm", None, create=True),
        mock.patch.object(generators.CudaRNGStatesTracker, "fork", _fork_nothing),
    ):
        yield module


def make_config(
    num_experts: int,
    num_topk: int,
    num_ranks: int,
    tp_size: int = 1,
    *,
    hidden: int = 64,
    **options: Any,
) -> Any:
    """A `TransformerConfig` of Megatron with one MoE layer.

    Args:
        num_experts: Number of experts over all EP ranks.
        num_topk: Experts of a token.
        num_ranks: TP times EP ranks.
        tp_size: TP ranks of an expert.
        hidden: Elements of a token.
        options: Options of `TransformerConfig`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _module("megatron.core.transformer.transformer_config").TransformerConfig(
            hidden_size=hidden,
            num_moe_experts=num_experts,
            moe_router_topk=num_topk,
            moe_router_dtype="fp32",
            expert_model_parallel_size=num_ranks // tp_size,
            expert_tensor_parallel_size=tp_size,
            add_bias_linear=False,
            **{"num_layers": 1, "num_attention_heads": 1, **options},
        )


def make_groups(rank_idx: int, num_ranks: int, tp_size: int) -> Any:
    """Groups as Megatron's dispatchers take them: ranks in order of EP rank, then TP rank. Collective."""
    mine: dict[str, Any] = {"tp_ep": dist.group.WORLD}
    by_name = {
        "expt_tp": [range(first, first + tp_size) for first in range(0, num_ranks, tp_size)],
        "ep": [range(first, num_ranks, tp_size) for first in range(tp_size)],
    }
    for name, all_ranks in by_name.items():
        for ranks in all_ranks:
            group = dist.new_group(list(ranks))
            if rank_idx in ranks:
                mine[name] = group
    return types.SimpleNamespace(**mine)


def start_parallel_state(ep_size: int, tp_size: int = 1) -> None:
    """Megatron's parallel state over the default group, where it is not there yet. Collective."""
    parallel_state = _module("megatron.core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=ep_size, expert_tensor_parallel_size=tp_size
        )


def make_moe_layer(config: Any) -> Any:
    """Megatron's own `MoELayer` with its router and sequential experts; parameters equal on every call.

    Collective: initializes Megatron's parallel state over the default group where it is not yet.
    """
    start_parallel_state(config.expert_model_parallel_size, config.expert_tensor_parallel_size)
    moe = "megatron.core.transformer.moe"
    linear = _module("megatron.core.tensor_parallel.layers")
    experts = _module("megatron.core.transformer.spec_utils").ModuleSpec(
        module=_module(f"{moe}.experts").SequentialMLP,
        submodules=_module("megatron.core.transformer.mlp").MLPSubmodules(
            linear_fc1=linear.ColumnParallelLinear, linear_fc2=linear.RowParallelLinear
        ),
    )
    layers = _module(f"{moe}.moe_layer")
    layer = layers.MoELayer(config, layers.MoESubmodules(experts=experts))
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return layer


class Experts(torch.nn.Module):
    """Local experts, one matrix each; every row is multiplied by its weight, as Megatron does.

    Args:
        expert_indices: Global ids; experts of equal ids are equal.
        hidden: Elements of a row.
        tp_rank: Shards of an expert on different TP ranks are different.
    """

    def __init__(self, expert_indices: Sequence[int], hidden: int, tp_rank: int = 0) -> None:
        super().__init__()
        weights = []
        for expert_idx in expert_indices:
            generator = torch.Generator().manual_seed(1000 * tp_rank + expert_idx)
            weights.append(torch.randn(hidden, hidden, generator=generator) / hidden**0.5)
        self.weight = torch.nn.Parameter(torch.stack(weights))

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """Outputs `[M, hidden]` of rows grouped by expert."""
        parts = torch.split(rows, [int(num) for num in tokens_per_expert])
        outputs = [part @ weight for part, weight in zip(parts, self.weight, strict=True)]
        return torch.cat(outputs) * probs.to(rows.dtype)[:, None]


def run_layer(dispatcher: Any, experts: Experts, routed: Routed) -> dict[str, torch.Tensor]:
    """The six calls of a token dispatcher forward, and backward. Collective.

    Args:
        dispatcher: Dispatcher of Megatron or of this package.
        experts: Experts of this rank.
        routed: Tokens that this rank brings, with their routing.

    Returns:
        "y", "tokens_per_expert", "grad_x", "grad_probs" and "grad_weight".
    """
    x, routing_map, probs = routed
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
    hidden, token_probs = dispatcher.token_dispatch(hidden, token_probs)
    rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(hidden, token_probs)
    out = experts(rows, tokens_per_expert, row_probs)
    out = dispatcher.token_combine(dispatcher.combine_preprocess(out))
    y = dispatcher.combine_postprocess(out)
    experts.zero_grad()
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    assert probs.grad is not None
    return {
        "y": y.detach(),
        "tokens_per_expert": torch.as_tensor(tokens_per_expert),
        "grad_x": x.grad,
        "grad_probs": probs.grad,
        "grad_weight": experts.weight.grad.clone(),
    }
