"""The machines that a prediction is for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and its links, as their makers state them.

    Args:
        hbm_gbs: Bandwidth of device memory, reads and writes together, 1e9 bytes a second.
        nvlink_gbs: Bandwidth to peers of the node, one way.
        nic_gbs: Bandwidth to other nodes, one way, of the NIC that belongs to the GPU.
        nvlink_latency_us: Time from a store to its sight at a peer.
        nic_latency_us: Time from a put to its sight on another node.
        launch_us: Host and device time around one operation that moves nothing.
    """

    hbm_gbs: float
    nvlink_gbs: float
    nic_gbs: float
    nvlink_latency_us: float = 1.5
    nic_latency_us: float = 5.0
    launch_us: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal size.

    Args:
        machine: Machine of every rank.
        num_nodes: Domains that NVLink does not cross.
        num_local_ranks: Ranks per node.

    Raises:
        ValueError: A number is below 1.
    """

    machine: Machine
    num_nodes: int
    num_local_ranks: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_local_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.num_local_ranks


CLUSTERS: dict[str, Machine] = {
    "h800-cx7": Machine(hbm_gbs=3350, nvlink_gbs=200, nic_gbs=50),
    "h100-cx7": Machine(hbm_gbs=3350, nvlink_gbs=450, nic_gbs=50),
    "h200-cx7": Machine(hbm_gbs=4800, nvlink_gbs=450, nic_gbs=50),
    "b200-cx7": Machine(hbm_gbs=8000, nvlink_gbs=900, nic_gbs=50),
    "gb200-cx7": Machine(hbm_gbs=8000, nvlink_gbs=900, nic_gbs=50),
}
