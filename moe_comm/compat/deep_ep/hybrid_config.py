"""The template configuration of HybridEP: fields programs set and read."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_comm.compat.deep_ep.arguments import check_ints

TOKEN_TYPES = ("UINT16", "UINT8")

_LEAST_MAX_TOKENS = 512
_CHUNK = 64


def rounded_max_tokens(max_num_of_tokens_per_rank: int) -> int:
    """Round a maximum as HybridEP does: at least 512, whole chunks of 64."""
    return -(-max(max_num_of_tokens_per_rank, _LEAST_MAX_TOKENS) // _CHUNK) * _CHUNK


@dataclasses.dataclass
class HybridEpConfigInstance:
    """Template parameters of HybridEP's kernels.

    The first five say what the buffer was made for; nothing here is limited by them. The others are
    launch parameters of GPU kernels: kept as they were set, without effect.
    """

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 1
    num_of_nodes: int = 1
    pad_multiple: int = 0
    token_data_type: str = "UINT16"
    num_of_tokens_per_chunk_preprocessing_api: int = _CHUNK
    num_of_threads_per_block_preprocessing_api: int = 256
    num_of_blocks_preprocessing_api: int = 108
    num_of_blocks_permute: int = 0
    num_of_blocks_unpermute: int = 0
    num_of_stages_dispatch_api: int = 10
    num_of_stages_permute_block_dispatch_api: int = 10
    num_of_in_flight_s2g_dispatch_api: int = 8
    num_of_in_flight_s2g_permute_block_dispatch_api: int = 8
    num_of_additional_in_flight_s2g_dispatch_api: int = 6
    num_of_tokens_per_chunk_dispatch_api: int = _CHUNK
    num_of_blocks_dispatch_api: int = 24
    forward_dispatch_api: bool = True
    device_side_sync_dispatch_api: bool = True
    num_of_stages_g2s_combine_api: int = 10
    num_of_stages_s2g_combine_api: int = 2
    num_of_stages_g2s_unpermute_block: int = 2
    num_of_stages_s2g_unpermute_block: int = 2
    num_of_tokens_per_chunk_combine_api: int = _CHUNK
    num_of_tokens_per_group_combine_api: int = 4
    num_of_blocks_combine_api: int = 24
    num_of_additional_in_flight_s2g_combine_api: int = 2
    num_of_additional_in_flight_s2g_unpermute_block_combine_api: int = 2
    backward_combine_api: bool = True
    device_side_sync_combine_api: bool = True

    def update(self, **values: Any) -> None:
        """Set fields.

        Raises:
            TypeError: There is no such field, or the value is of another type.
            ValueError: The value is negative, or no token type.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        for name, value in values.items():
            if name not in fields:
                raise TypeError(f"HybridEpConfigInstance has no field {name!r}")
            if name == "token_data_type":
                if value not in TOKEN_TYPES:
                    raise ValueError(f"token_data_type must be one of {TOKEN_TYPES}, got {value!r}")
            elif not isinstance(value, bool):
                check_ints(0, **{name: value})
            setattr(self, name, value)


class Configurer:
    """Holds the configuration a `HybridEPBuffer` was made with, and what it grew to.

    Attributes:
        buffer_config: Largest sizes so far.
    """

    def __init__(self, buffer_config: HybridEpConfigInstance) -> None:
        self.buffer_config = buffer_config
        # The call before, which had the same shape most often: what it asked for, what the buffer
        # had then, and what came of both.
        self._latest: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None

    def instance(self, **values: Any) -> HybridEpConfigInstance:
        """A configuration with some fields set; the buffer's sizes grow with it."""
        is_plain = all(type(value) in (int, str) for value in values.values())
        now = (values, vars(self.buffer_config))
        if is_plain and self._latest is not None and self._latest[:2] == now:
            made = object.__new__(HybridEpConfigInstance)
            vars(made).update(self._latest[2])
            return made
        made = dataclasses.replace(self.buffer_config)
        made.update(**values)
        for name in ("hidden_dim", "max_num_of_tokens_per_rank", "num_of_experts_per_rank"):
            setattr(
                self.buffer_config,
                name,
                max(getattr(self.buffer_config, name), getattr(made, name)),
            )
        if is_plain:  # equals of another type are no equals here
            self._latest = (values, dict(vars(self.buffer_config)), dict(vars(made)))
        return made
