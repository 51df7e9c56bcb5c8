"""Sizes of published mixture-of-experts models."""

from __future__ import annotations

from moe_comm.cli.reshard.model_shapes import LatentAttention, MoEShape

PUBLISHED_SHAPES: dict[str, MoEShape] = {
    "mixtral-8x7b": MoEShape(
        num_layers=32,
        hidden=4096,
        num_heads=32,
        num_query_groups=8,
        num_experts=8,
        expert_ffn=14336,
        vocab=32000,
        has_expert_bias=False,
    ),
    "qwen3-30b-a3b": MoEShape(
        num_layers=48,
        hidden=2048,
        num_heads=32,
        num_query_groups=4,
        head_dim=128,
        num_experts=128,
        expert_ffn=768,
        vocab=151936,
        has_qk_norm=True,
        has_expert_bias=False,
    ),
    "qwen3-235b-a22b": MoEShape(
        num_layers=94,
        hidden=4096,
        num_heads=64,
        num_query_groups=4,
        head_dim=128,
        num_experts=128,
        expert_ffn=1536,
        vocab=151936,
        has_qk_norm=True,
        has_expert_bias=False,
    ),
    "deepseek-v3": MoEShape(
        num_layers=61,
        hidden=7168,
        num_heads=128,
        num_query_groups=128,
        num_experts=256,
        expert_ffn=2048,
        ffn=18432,
        num_dense_layers=3,
        shared_expert_ffn=2048,
        vocab=129280,
        latent_attention=LatentAttention(
            query_rank=1536, key_value_rank=512, head_dim=128, rope_dim=64, value_dim=128
        ),
    ),
    "kimi-k2": MoEShape(
        num_layers=61,
        hidden=7168,
        num_heads=64,
        num_query_groups=64,
        num_experts=384,
        expert_ffn=2048,
        ffn=18432,
        num_dense_layers=1,
        shared_expert_ffn=2048,
        vocab=163840,
        latent_attention=LatentAttention(
            query_rank=1536, key_value_rank=512, head_dim=128, rope_dim=64, value_dim=128
        ),
    ),
}
"""By name."""
