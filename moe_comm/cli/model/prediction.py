"""Answer of `moe-comm model`."""

from __future__ import annotations

import dataclasses

from moe_comm.cli.model.cluster import Cluster
from moe_comm.cli.model.drawn_routing import draw_traffic
from moe_comm.cli.model.simulation import BYTES_PER_US, SimulatedOperation, simulate
from moe_comm.cli.model.workload import Bytes, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationPrediction:
    """One operation, by formula and simulated.

    Args:
        operation: "dispatch" or "combine".
        mean_bytes: Bytes of one rank by formula, under uniform routing.
        bound_us: Time of the slowest of memory, NVLink and NIC at their stated speed; no latency.
        bound_by: Name of the slowest.
        simulated: Simulation with the routing that was drawn.
    """

    operation: str
    mean_bytes: Bytes
    bound_us: float
    bound_by: str
    simulated: SimulatedOperation


def predict(
    workload: Workload, cluster: Cluster, *, skew: float, seed: int, num_chunks: int
) -> list[OperationPrediction]:
    """Dispatch and combine of `workload` on `cluster`.

    Raises:
        ValueError: The experts do not spread evenly, or `max_nodes` is too small for K experts.
    """
    workload.check(cluster)
    predictions = []
    for operation, movement, mean_bytes in (
        ("dispatch", workload.dispatch, Bytes.of_dispatch(workload, cluster)),
        ("combine", workload.combine, Bytes.of_combine(workload, cluster)),
    ):
        simulated = simulate(
            draw_traffic(workload, cluster, movement, skew=skew, seed=seed),
            workload,
            cluster,
            is_combine=operation == "combine",
            num_chunks=num_chunks,
            count_row_bytes=mean_bytes.count_rows,
        )
        machine = cluster.machine
        bounds = {
            "memory": mean_bytes.memory / machine.hbm_gbs / BYTES_PER_US,
            "NVLink": mean_bytes.nvlink / machine.nvlink_gbs / BYTES_PER_US,
            "NIC": mean_bytes.nic / machine.nic_gbs / BYTES_PER_US,
        }
        bound_by = max(bounds, key=lambda name: bounds[name])
        predictions.append(
            OperationPrediction(
                operation=operation,
                mean_bytes=mean_bytes,
                bound_us=bounds[bound_by],
                bound_by=bound_by,
                simulated=simulated,
            )
        )
    return predictions
