"""Options of a refit that a caller gives beside its models and its copy service."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch.distributed as dist

from moe_comm.arguments import as_int, check_bool
from moe_comm.peers.bootstrap import Bootstrap

Group: TypeAlias = "dist.ProcessGroup | Bootstrap | None"

Verify = Literal["plan", "checksum"] | None
"""None; "plan": a plan is verified when it is made; "checksum": and every refit after it ran."""

VERIFY = (None, "plan", "checksum")

DeltaKind = Literal["blocks", "checked"] | None
"""None: everything moves; "blocks": what changed; "checked": and targets are read before."""

DELTAS = (None, "blocks", "checked")


class RefitOptions(NamedTuple):
    """The options of a refit, which every call hands on whole; `swap_model_weights` says what each does."""

    group: Group = None
    src_rank_offset: int = 0
    dst_rank_offset: int = 0
    transform: Any = None
    num_dst_pools: int = 1
    dst_pool_index: int = 0
    verify: Verify = "plan"
    strict: bool = False
    execution_batch_bytes: int | None = None
    deltas: DeltaKind = None

    def check_pools(self) -> None:
        """Raise where this rank's target belongs to no pool."""
        as_int("num_dst_pools", self.num_dst_pools, 1)
        if not 0 <= as_int("dst_pool_index", self.dst_pool_index) < self.num_dst_pools:
            raise ValueError(
                f"dst_pool_index must be in [0, {self.num_dst_pools}), got {self.dst_pool_index}"
            )

    def check(self) -> None:
        """Raise where anything else is wrong but the group and the transform."""
        if not (self.verify is None or self.verify in VERIFY):
            raise ValueError(f"verify must be one of {VERIFY}, got {self.verify!r}")
        if not (self.deltas is None or self.deltas in DELTAS):
            raise ValueError(f"deltas must be one of {DELTAS}, got {self.deltas!r}")
        check_bool("strict", self.strict)
        if self.execution_batch_bytes is not None:
            as_int("execution_batch_bytes", self.execution_batch_bytes, 1)
        as_int("src_rank_offset", self.src_rank_offset, 0)
        as_int("dst_rank_offset", self.dst_rank_offset, 0)
