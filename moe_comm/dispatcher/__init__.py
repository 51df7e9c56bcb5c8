"""Token dispatchers: one for anybody's MoE layer, and the shapes that frameworks expect.

`plain.TokenDispatcher` is for layers of one's own. The modules `megatron`, `torchtitan`,
`transformers`, `sglang` and `vllm` speak the protocol of the framework they are named after; none needs it to be installed.
"""

from __future__ import annotations

from moe_comm.dispatcher.plain import DispatchedTokens, TokenDispatcher

__all__ = ["DispatchedTokens", "TokenDispatcher"]
