"""`Config` and the sizes that DeepEP programs ask for before they make a buffer.

Nothing here allocates by these numbers: the heap grows with what arrives. They exist because programs
compute with them; formulas and recommended values are DeepEP's, continued to any number of ranks.
"""

from __future__ import annotations

import dataclasses

import torch

topk_idx_t = torch.int64
"""Dtype of expert ids."""

_ALIGNMENT_BYTES = 128
_NUM_RANKS_PER_NODE = 8
_NUM_MAX_TOPK = 128  # what a queue slot of theirs has room for
_TOPK_BYTES = _NUM_MAX_TOPK * topk_idx_t.itemsize
_WEIGHT_BYTES = _NUM_MAX_TOPK * 4
_SCALE_BYTES = _NUM_MAX_TOPK * 4
_RDMA_META_BYTES = 18 * 2 * 4

# Ranks: (nvl_send, nvl_recv, rdma_send, rdma_recv).
_DISPATCH = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


@dataclasses.dataclass
class Config:
    """Launch parameters of DeepEP's kernels. Only `num_sms` shows here: in the shape of V1 handles.

    Args:
        num_sms: SMs of a kernel; even where it is used. A V1 handle has `num_sms / 2` channels.
        num_max_nvl_chunked_send_tokens: Tokens of a chunk within a node.
        num_max_nvl_chunked_recv_tokens: Tokens of a queue within a node; more than a chunk.
        num_max_rdma_chunked_send_tokens: Tokens of a chunk between nodes.
        num_max_rdma_chunked_recv_tokens: Tokens of a queue between nodes, at least two chunks; rounded
            up to whole chunks.

    Raises:
        ValueError: A rule above is broken.
        TypeError: A value is not an int.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.name == "num_sms" else 1
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name} must be an int, got {value!r}")
            if value < minimum:
                raise ValueError(f"{field.name} must be >= {minimum}, got {value}")
        for kind in ("nvl", "rdma"):
            send = getattr(self, f"num_max_{kind}_chunked_send_tokens")
            recv = getattr(self, f"num_max_{kind}_chunked_recv_tokens")
            if send >= recv:
                raise ValueError(
                    f"num_max_{kind}_chunked_send_tokens must be less than "
                    f"num_max_{kind}_chunked_recv_tokens, got {send} and {recv}"
                )
        chunk = self.num_max_rdma_chunked_send_tokens
        queue = -(-self.num_max_rdma_chunked_recv_tokens // chunk) * chunk
        self.num_max_rdma_chunked_recv_tokens = queue
        if chunk > queue // 2:
            raise ValueError(
                "num_max_rdma_chunked_send_tokens must be at most half of "
                f"num_max_rdma_chunked_recv_tokens, got {chunk} and {queue}"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP's queues within a node would take; any number of ranks."""
        _check_sizes(hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        num_channels = self.num_sms // 2
        num_peers = min(num_ranks, _NUM_RANKS_PER_NODE)
        num_nodes = _num_nodes(num_ranks)
        slot_bytes = hidden_bytes + 8 + _TOPK_BYTES + _WEIGHT_BYTES + _SCALE_BYTES
        num_slots = num_channels * num_peers * self.num_max_nvl_chunked_recv_tokens
        return _align(num_channels * num_peers * (2 * num_nodes + 3) * 4 + num_slots * slot_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP's queues between nodes would take; 0 up to 8 ranks."""
        _check_sizes(hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        if num_ranks <= _NUM_RANKS_PER_NODE:
            return 0
        num_queues = self.num_sms // 2 * _num_nodes(num_ranks)
        slot_bytes = hidden_bytes + 8 + _TOPK_BYTES + _WEIGHT_BYTES + _SCALE_BYTES + 16
        num_slots = num_queues * self.num_max_rdma_chunked_recv_tokens * 2
        return _align(num_queues * _RDMA_META_BYTES + num_slots * slot_bytes)


def recommended_dispatch_config(num_sms: int, num_ranks: int) -> Config:
    """DeepEP's recommendation where it has one, else that of the next larger size it lists."""
    return _recommended(_DISPATCH, num_sms, num_ranks)


def recommended_combine_config(num_sms: int, num_ranks: int) -> Config:
    """Return the recommended configuration for combine, see `recommended_dispatch_config`."""
    return _recommended(_COMBINE, num_sms, num_ranks)


def low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes that DeepEP's low-latency buffers would take."""
    _check_sizes(hidden=hidden, num_ranks=num_ranks, num_experts=num_experts)
    if num_max_dispatch_tokens_per_rank < 0:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank must be >= 0, got {num_max_dispatch_tokens_per_rank}"
        )
    num_scales = hidden // 128
    dispatch_bytes = 16 + max(2 * hidden, hidden + 4 * num_scales)
    combine_bytes = 4 * num_scales + 2 * hidden
    num_tokens = num_max_dispatch_tokens_per_rank
    send_bytes = max(num_tokens * dispatch_bytes, num_experts * num_tokens * combine_bytes)
    recv_bytes = num_experts * num_tokens * max(dispatch_bytes, combine_bytes)
    total = 2 * (send_bytes + recv_bytes + _align(4 * num_experts))
    return (total // _ALIGNMENT_BYTES + 1) * _ALIGNMENT_BYTES


def _recommended(
    table: dict[int, tuple[int, int, int, int]], num_sms: int, num_ranks: int
) -> Config:
    _check_sizes(num_ranks=num_ranks)
    listed = min((size for size in table if size >= num_ranks), default=max(table))
    return Config(num_sms, *table[listed])


def _num_nodes(num_ranks: int) -> int:
    return -(-num_ranks // _NUM_RANKS_PER_NODE)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
