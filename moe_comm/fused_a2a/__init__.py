"""Megatron's functions over this package: every name of `megatron.core.transformer.moe.fused_a2a`.

Signatures are those of the releases core_r0.16 to main, told apart by the number of positional
arguments; a keyword always means what it says. The functions of DeepEP and HybridEP always exist,
because a backend always does; those of NCCL EP are as without Transformer Engine. Every call is collective over its group, and so is its backward.

Numbers of SMs and blocks, `fused`, `async_finish` and `allocate_on_comm_stream` choose among GPU kernels
and streams. They are checked, and have no effect: what follows a call in its stream comes behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from moe_comm.arguments import as_dense, check_kind
from moe_comm.dispatcher import permuted
from moe_comm.dispatcher.permuted import PermutedHandle, check_no_transform
from moe_comm.ep import autograd
from moe_comm.ep.autograd import operators
from moe_comm.ep.autograd.gradient_agreement import combine_word, dispatch_word
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import DispatchHandle
from moe_comm.fused_a2a.arguments import (
    DISPATCH_AS_IN_MAIN,
    DISPATCH_FIXED,
    DISPATCH_MAIN,
    DISPATCH_OPTIONS,
    INIT_FIXED,
    INIT_MAIN,
    INIT_R0_16,
    TUNING,
    bind_arguments,
    check_count,
    check_flags,
    check_tuning,
    dispatch_order,
)
from moe_comm.fused_a2a.group_buffer import Group, GroupBuffer, buffer_of_group
from moe_comm.fused_a2a.nccl_ep import (
    HAVE_TE_EP,
    alloc_ep_symm_buffer,
    ensure_nccl_ep_bootstrapped,
    is_nccl_ep_bootstrapped,
    nccl_ep_combine,
    nccl_ep_dispatch,
    nccl_ep_finalize,
    new_nccl_ep_buffer,
)
from moe_comm.peers import missed_calls
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors.quantization import FP8_BLOCK128

__all__ = [
    "HAVE_DEEP_EP",
    "HAVE_HYBRIDEP",
    "HAVE_TE_EP",
    "HYBRIDEP_TOKEN_ALIGNMENT",
    "FusedCombine",
    "FusedDispatch",
    "HybridEPCombine",
    "HybridEPDispatch",
    "alloc_ep_symm_buffer",
    "ensure_nccl_ep_bootstrapped",
    "fused_combine",
    "fused_dispatch",
    "get_buffer",
    "get_hidden_bytes",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "is_nccl_ep_bootstrapped",
    "nccl_ep_combine",
    "nccl_ep_dispatch",
    "nccl_ep_finalize",
    "new_nccl_ep_buffer",
    "reset_hybrid_ep_buffer",
    "set_deepep_num_sms",
]

HAVE_DEEP_EP = True
HAVE_HYBRIDEP = True
HYBRIDEP_TOKEN_ALIGNMENT = 64
"""Megatron pads uneven token counts to a multiple of this; nothing here needs it."""

# The names that Megatron's callers read: those of the latest group. None makes the next call ask again.
_buffer: GroupBuffer | None = None
_hybrid_ep_buffer: GroupBuffer | None = None

# Kept for every group until its process group is destroyed: ranks agree on what is held.
_buffers: dict[int, GroupBuffer] = {}
_hybrid_ep_buffers: dict[int, GroupBuffer] = {}
_lock = threading.Lock()


def get_hidden_bytes(x: torch.Tensor) -> int:
    """Bytes of a row of `x`, of two bytes an element at least."""
    return x.size(1) * max(x.element_size(), 2)


def get_buffer(group: Group, hidden_bytes: int) -> GroupBuffer:
    """The buffer of a group, made on first use; collective where it is made.

    Args:
        group: Process group, bootstrap, or None for the default group.
        hidden_bytes: Bytes of a row; the buffer grows where it needs to.
    """
    global _buffer
    check_count("hidden_bytes", hidden_bytes)
    buffer = buffer_of_group(_buffers, group)
    buffer.num_nvl_bytes = max(buffer.num_nvl_bytes, hidden_bytes)
    _buffer = buffer
    return buffer


def set_deepep_num_sms(num_sms: int) -> None:
    """Check a number of SMs; no effect.

    Raises:
        TypeError: Not an int.
        ValueError: Negative.
    """
    check_count("num_sms", num_sms)


class FusedHandle(NamedTuple):
    """State of a `fused_dispatch` that combine and the backward need; opaque."""

    buffer: EpBuffer
    places: DispatchHandle


FusedDispatched: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, FusedHandle
]
HybridDispatched: TypeAlias = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, PermutedHandle
]


def _requiring_alike(
    x: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inputs, one of which becomes a leaf where only the other needs a gradient.

    Of a function of autograd, which these are to Megatron, all outputs have one then.
    """
    if (
        isinstance(probs, torch.Tensor)  # what is none is refused later
        and torch.is_grad_enabled()
        and x.requires_grad is not probs.requires_grad
    ):
        return _as_leaf(x), _as_leaf(probs)
    return x, probs


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    return (tensor.clone() if tensor.is_inference() else tensor.detach()).requires_grad_()


def _latest_of(
    buffers: dict[int, GroupBuffer], position: int
) -> Callable[[tuple[Any, ...], dict[str, Any]], EpBuffer | None]:
    """The buffer that peers of a call are taken to use: that of the call before, of its group.

    Args:
        buffers: Buffer of every group.
        position: Position of `group` among the positional arguments, -1 if there is none.
    """

    def buffer_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> EpBuffer | None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, FusedHandle | PermutedHandle):
                return given.buffer
        if position < 0:
            return next(iter(buffers.values())).latest if len(buffers) == 1 else None
        group = kwargs.get("group", args[position] if len(args) > position else None)
        return buffer_of_group(buffers, group).latest

    return buffer_of


@rejects_unbound("dispatch", _latest_of(_buffers, 4))
def fused_dispatch(
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor | None,
    num_experts: int,
    group: Group,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> FusedDispatched:
    """Send every token once to every rank that has one of its experts.

    Args:
        x: `[num_tokens, hidden]`.
        token_indices: Integers `[num_tokens, num_topk]`, any number of choices; -1 marks an unused one.
        token_probs: `[num_tokens, num_topk]`, any float dtype, or None.
        num_experts: Experts over all ranks.
        group: Process group, bootstrap, or None for the default group.
        async_finish: No effect.
        allocate_on_comm_stream: No effect.

    Returns:
        Rows `[M, hidden]` in order of (source rank, token); their choices int64 `[M, num_topk]`, local
        expert ids, -1 elsewhere; their probabilities float32 `[M, num_topk]`, 0 elsewhere, or None;
        tokens of every local expert, int64 on the host; the handle, opaque.
    """
    held = get_buffer(group, 0)
    if type(num_experts) is not int or num_experts < 1:
        with Telling(held.reject, "dispatch"):
            check_count("num_experts", num_experts, minimum=1)
    buffer = held.ep_buffer(num_experts, x)
    with Telling(buffer.reject, "dispatch"):
        check_flags(async_finish, allocate_on_comm_stream)
        get_buffer(group, get_hidden_bytes(as_dense("x", x)))
        if token_indices.is_floating_point() or token_indices.is_complex():
            raise TypeError(f"token_indices must be integers, got {token_indices.dtype}")
        topk_idx = token_indices.to(torch.int64)
        check_no_transform()
        x, token_probs = _requiring_alike(x, token_probs)
        weights = None if token_probs is None else token_probs.float()
    result = autograd.dispatch(x, topk_idx, weights, buffer=buffer, layout=Layout.RANK_MAJOR)
    assert result.topk_idx is not None
    return (
        result.x,
        result.topk_idx,
        result.topk_weights,
        result.num_tokens_per_expert,
        FusedHandle(buffer, result.handle),
    )


@rejects_unbound("combine", _latest_of(_buffers, 1))
def fused_combine(
    x: torch.Tensor,
    group: Group,
    handle: FusedHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[torch.Tensor, None]:
    """Sum rows `[M, hidden]` back to their tokens, unweighted: `[num_tokens, hidden]`, and None."""
    try:
        check_kind("handle", handle, FusedHandle)
    except TypeError as error:
        buffer_of_group(_buffers, group).reject("combine", error)
    buffer, places = handle
    with Telling(buffer.reject, "combine"):
        check_flags(async_finish, allocate_on_comm_stream)
        held = get_buffer(group, get_hidden_bytes(as_dense("x", x)))
        if held.ep_buffer(buffer.config.num_experts, x) is not buffer:
            raise ValueError("handle belongs to the buffer of another group")
        check_no_transform()
    return autograd.combine(x, places, buffer=buffer), None


class _Function(torch.autograd.Function):
    """A class of Megatron whose `apply` is a function of this module, which is differentiable itself.

    `forward` and `backward` are for callers with a context of their own; `forward` records nothing. A
    subclass that overrides them is an ordinary function of autograd.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the class's function, or the node of a subclass that overrides `forward`."""
        function = cls.__dict__.get("function", super().apply)
        return function(*args, **kwargs)


def _gradients_of(ctx: Any, gradients: dict[int, torch.Tensor | None]) -> tuple[Any, ...]:
    """One gradient for every argument that forward got."""
    return tuple(gradients.get(idx) for idx in range(len(ctx.needs_input_grad)))


class FusedDispatch(_Function):
    """`fused_dispatch` by Megatron's name: `apply` takes its arguments."""

    function = staticmethod(fused_dispatch)

    @staticmethod
    @torch.no_grad()
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token_indices: torch.Tensor,
        token_probs: torch.Tensor | None,
        num_experts: int,
        group: Group,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> FusedDispatched:
        """Return the result of `fused_dispatch`, without a graph; `ctx` keeps the handle for `backward`."""
        arrived = fused_dispatch(
            x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream
        )
        ctx.handle = arrived[-1]
        ctx.probs_dtype = None if token_probs is None else token_probs.dtype
        return arrived

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_output: torch.Tensor,
        grad_token_indices: None,
        grad_token_probs: torch.Tensor | None,
        grad_tokens_per_expert: None,
        grad_handle: None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Combine the gradients of the rows; those of the probabilities come back with them."""
        buffer, places = ctx.handle
        has_probs = ctx.probs_dtype is not None
        num_rows, hidden = grad_output.shape
        grad_x, grad_probs = operators.dispatch_backward(
            buffer,
            places,
            grad_output,
            None if grad_token_probs is None else grad_token_probs.float(),
            num_rows,
            hidden,
            grad_output.dtype,
            torch.float32 if has_probs else None,
        )
        return _gradients_of(
            ctx, {0: grad_x, 2: grad_probs.to(ctx.probs_dtype) if has_probs else None}
        )


class FusedCombine(_Function):
    """`fused_combine` by Megatron's name: `apply` takes its arguments."""

    function = staticmethod(fused_combine)

    @staticmethod
    @torch.no_grad()
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        handle: FusedHandle,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """The sums `[num_tokens, hidden]` and None, without a graph; `ctx` keeps the handle."""
        ctx.handle = handle
        return fused_combine(x, group, handle, async_finish, allocate_on_comm_stream)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: torch.Tensor, previous_event: None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Dispatch the gradient to the places of the rows."""
        buffer, places = ctx.handle
        _, hidden = grad_output.shape
        grad_x, _ = operators.combine_backward(
            buffer, places, grad_output, None, None, hidden, grad_output.dtype
        )
        return _gradients_of(ctx, {0: grad_x})


def init_hybrid_ep_buffer(*args: Any, **kwargs: Any) -> None:
    """Announce what HybridEP calls of a group will bring. Collective on the first use of the group.

    Positional order: group, hidden_dim, num_tokens (r0.16: seq_len), num_local_experts,
    num_sms_dispatch_api, num_sms_combine_api, then num_blocks_permute, num_blocks_unpermute,
    fp8_dispatch, num_sms_preprocessing_api; in r0.16 fp8_dispatch is the seventh, which a bool there
    tells. All but the first four may be left out.

    Args:
        args: See above.
        kwargs: See above; `fp8_dispatch`: rows travel as `FP8_BLOCK128`, forward; gradients do not.

    Raises:
        TypeError: A name is unknown or missing, or a type is wrong.
        ValueError: A number is negative.
    """
    global _hybrid_ep_buffer
    if "seq_len" in kwargs:
        kwargs["num_tokens"] = kwargs.pop("seq_len")
    names = INIT_R0_16 if len(args) == 7 and isinstance(args[6], bool) else INIT_MAIN
    given = bind_arguments("init_hybrid_ep_buffer", names, args, kwargs, INIT_MAIN, INIT_FIXED)
    for name in INIT_MAIN[1:4]:
        check_count(name, given[name])
    check_tuning(given.get("fused", False), *map(given.get, TUNING))
    fp8_dispatch = given.get("fp8_dispatch", False)
    if not isinstance(fp8_dispatch, bool):
        raise TypeError(f"fp8_dispatch must be a bool, got {fp8_dispatch!r}")
    buffer = buffer_of_group(_hybrid_ep_buffers, given["group"])
    with _lock:
        buffer.hidden_dim = given["hidden_dim"]
        buffer.max_num_of_tokens_per_rank = given["num_tokens"]
        buffer.num_local_experts = given["num_local_experts"]
        buffer.use_fp8 = fp8_dispatch
        _hybrid_ep_buffer = buffer


def reset_hybrid_ep_buffer() -> None:
    """Forget what `init_hybrid_ep_buffer` announced, for every group. Local; handles stay valid."""
    global _hybrid_ep_buffer
    with _lock:
        _hybrid_ep_buffer = None
        _forget_announcements()


def _forget_announcements() -> None:
    for buffer in list(_hybrid_ep_buffers.values()):  # other threads meet other groups meanwhile
        buffer.hidden_dim = buffer.max_num_of_tokens_per_rank = buffer.num_local_experts = 0
        buffer.use_fp8 = False


def hybrid_ep_dispatch(*args: Any, **kwargs: Any) -> HybridDispatched:
    """Send every token to the experts of its row of a routing map; rows arrive permuted by expert.

    Positional order: x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api,
    num_sms_combine_api, then by the number of positional arguments: num_permuted_tokens, pad_multiple
    (9 or fewer: r0.16), or num_blocks_permute, num_blocks_unpermute, fused, num_permuted_tokens,
    pad_multiple (12: r0.17), and num_sms_preprocessing_api behind them (13: main). A keyword replaces
    what a position says.

    Args:
        args: See above. x: `[num_tokens, hidden]`. routing_map: bool `[num_tokens, num_experts]`, any
            number of experts a token. probs: `[num_tokens, num_experts]`, any float dtype, or None.
            num_permuted_tokens: rows of the result, exactly; what does not fit is dropped, and the
            last element of the handle, int32 `[1]`, is 1 then. None: as many as arrive.
            pad_multiple: rows of every expert are padded with zero rows to a multiple; None: 1.
        kwargs: See above.

    Returns:
        Rows `[M, hidden]`, local expert 0 first (`QuantizedRows` with `fp8_dispatch`); their
        probabilities float32 `[M]`, 0 in padding, or None; their scale factors, or None; rows of every
        local expert, int64 on the host, padding included; the handle.

    Raises:
        TypeError: 10, 11 or more than 13 positional arguments; a name is unknown or missing.
        ValueError: See `EpBuffer.dispatch`.
    """
    if (not kwargs and len(args) in DISPATCH_AS_IN_MAIN) or (
        len(args) == len(DISPATCH_FIXED) and kwargs.keys() <= DISPATCH_OPTIONS
    ):
        return _hybrid_dispatch(*args, **kwargs)
    try:
        name, order = "hybrid_ep_dispatch", dispatch_order(len(args))
        given = bind_arguments(name, order, args, kwargs, DISPATCH_MAIN, DISPATCH_FIXED)
    except TypeError as error:
        buffer = _latest_of(_hybrid_ep_buffers, 3)(args, kwargs)
        if buffer is not None:
            buffer.reject("dispatch", error)
        missed_calls.keep("dispatch", error)
        raise
    return _hybrid_dispatch(**given)


def _hybrid_dispatch(
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    group: Group,
    num_local_experts: int,
    num_sms_dispatch_api: int | None = None,
    num_sms_combine_api: int | None = None,
    num_blocks_permute: int | None = None,
    num_blocks_unpermute: int | None = None,
    fused: bool = False,
    num_permuted_tokens: int | torch.Tensor | None = None,
    pad_multiple: int | None = None,
    num_sms_preprocessing_api: int | None = 108,
) -> HybridDispatched:
    """`hybrid_ep_dispatch` with the arguments of main."""
    held = _hybrid_buffer(group)
    if type(num_local_experts) is not int or num_local_experts < 1:
        with Telling(held.reject, "dispatch"):
            check_count("num_local_experts", num_local_experts, minimum=1)
    buffer = held.ep_buffer(num_local_experts * held.group_size, x)
    with Telling(buffer.reject, "dispatch"):
        check_tuning(
            fused,
            num_sms_dispatch_api,
            num_sms_combine_api,
            num_blocks_permute,
            num_blocks_unpermute,
            num_sms_preprocessing_api,
        )
        held.see(as_dense("x", x).shape, num_local_experts)
        num_rows = None if num_permuted_tokens is None else int(num_permuted_tokens)
        if num_rows is not None and num_rows % (pad_multiple or 1):
            raise ValueError(
                f"num_permuted_tokens must be a multiple of pad_multiple = {pad_multiple}, got "
                f"{num_rows}"
            )
        check_no_transform()
        x, probs = _requiring_alike(x, probs)
    arrived = permuted.start_dispatch(
        buffer,
        x,
        routing_map,
        probs,
        expert_alignment=pad_multiple or 1,
        num_rows=num_rows,
        quantization=FP8_BLOCK128 if held.use_fp8 else None,
        gradients=dispatch_word(x, probs),
    ).wait_differentiable(x, probs)
    return arrived.hidden, arrived.probs, arrived.sf, arrived.tokens_per_expert, arrived.handle


@rejects_unbound("combine", _latest_of(_hybrid_ep_buffers, -1))
def hybrid_ep_combine(
    x: torch.Tensor,
    handle: PermutedHandle,
    num_permuted_tokens: int | torch.Tensor | None = None,
    pad_multiple: int | None = None,
    fused: bool = False,
) -> torch.Tensor:
    """Sum rows back to their tokens, unweighted, in ascending order of expert.

    Args:
        x: `[M, hidden]`; rows of padding are not read.
        handle: Handle from `hybrid_ep_dispatch`.
        num_permuted_tokens: M, or None.
        pad_multiple: Multiple that the dispatch was given, or None.
        fused: No effect.

    Returns:
        `[num_tokens, hidden]`.
    """
    try:
        check_kind("handle", handle, PermutedHandle)
    except TypeError as error:
        if len(_hybrid_ep_buffers) != 1:
            raise  # of which group it should be is unknown
        next(iter(_hybrid_ep_buffers.values())).reject("combine", error)
    places = handle.places
    with Telling(handle.buffer.reject, "combine"):
        if fused is not False:
            check_tuning(fused)
        if pad_multiple and pad_multiple != places.expert_alignment:
            raise ValueError(
                f"pad_multiple is {pad_multiple}, the handle's is {places.expert_alignment}"
            )
        if num_permuted_tokens is not None and num_permuted_tokens != places.num_recv_tokens:
            raise ValueError(
                f"num_permuted_tokens is {int(num_permuted_tokens)}, the handle's dispatch brought "
                f"{places.num_recv_tokens} rows"
            )
        check_no_transform()
    word = combine_word(x, None, places.link)
    return permuted.start_combine(x, handle, gradients=word).wait_differentiable(x)


class HybridEPDispatch(_Function):
    """`hybrid_ep_dispatch` by Megatron's name: `apply` takes its arguments."""

    function = staticmethod(hybrid_ep_dispatch)

    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, *args: Any) -> HybridDispatched:
        """Return `hybrid_ep_dispatch`'s result, without a graph; `ctx` keeps the handle for `backward`."""
        arrived = hybrid_ep_dispatch(*args)
        ctx.handle = arrived[-1]
        return arrived

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_x: torch.Tensor,
        grad_probs: torch.Tensor | None,
        grad_scaling_factor: torch.Tensor | None,
        grad_tokens_per_expert: None,
        grad_handle: None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Combine the gradients of the rows; those of the probabilities come back with them."""
        grad_tokens, grad_dense = permuted.gradient_of_dispatch(grad_x, grad_probs, ctx.handle)
        return _gradients_of(ctx, {0: grad_tokens, 2: grad_dense})


class HybridEPCombine(_Function):
    """`hybrid_ep_combine` by Megatron's name: `apply` takes its arguments."""

    function = staticmethod(hybrid_ep_combine)

    @staticmethod
    @torch.no_grad()
    def forward(
        ctx: Any,
        x: torch.Tensor,
        handle: PermutedHandle,
        num_permuted_tokens: int | torch.Tensor | None = None,
        pad_multiple: int | None = None,
        fused: bool = False,
    ) -> torch.Tensor:
        """The sums `[num_tokens, hidden]`, without a graph; `ctx` keeps the handle for `backward`."""
        ctx.handle = handle
        return hybrid_ep_combine(x, handle, num_permuted_tokens, pad_multiple, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Dispatch the gradient to the places of the rows."""
        return _gradients_of(ctx, {0: permuted.gradient_of_combine(grad_x, ctx.handle)})


def _hybrid_buffer(group: Group) -> GroupBuffer:
    global _hybrid_ep_buffer
    buffer = buffer_of_group(_hybrid_ep_buffers, group)
    if _hybrid_ep_buffer is not buffer:
        with _lock:
            if _hybrid_ep_buffer is None:
                _forget_announcements()  # the caller may have reset the name by hand
            _hybrid_ep_buffer = buffer
    return buffer
