"""`moe-comm model`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Literal

import typer
from rich.table import Table

from moe_comm.cli.command_rules import FoldedTable, in_a_sentence, wide_console
from moe_comm.cli.model.cluster import CLUSTERS, Cluster
from moe_comm.cli.model.prediction import OperationPrediction, predict
from moe_comm.cli.model.workload import Movement, Workload
from moe_comm.ep import budget as formulas
from moe_comm.ep.config import quantized_sizes
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8

MAX_RANKS = 2048


ClusterName = Literal["h800-cx7", "h100-cx7", "h200-cx7", "b200-cx7", "gb200-cx7"]
"""Names of `CLUSTERS`."""

WireName = Literal["bf16", "fp8_block128", "mxfp8"]
"""Formats of dispatched rows."""

QUANTIZATIONS = {"bf16": None, "fp8_block128": FP8_BLOCK128, "mxfp8": MXFP8}
# A scale factor of 4 bytes per 128 channels, of 1 byte per 32: the same on average.
WIRE_BYTES = {"bf16": 2.0, "fp8_block128": 1.03125, "mxfp8": 1.03125}


def model(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, NVLink domains.")] = 8,
    local_ranks: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of every rank.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Elements per row.")] = 7168,
    topk: Annotated[int, typer.Option(min=1, help="Choices per token.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 256,
    wire: Annotated[WireName, typer.Option(help="Dispatched rows.")] = "bf16",
    cluster: Annotated[
        ClusterName, typer.Option(help="Speeds of GPU and links, as their makers state them.")
    ] = "h100-cx7",
    hbm_gbs: Annotated[float | None, typer.Option(help="Device memory, GB/s.")] = None,
    nvlink_gbs: Annotated[float | None, typer.Option(help="NVLink, GB/s one way.")] = None,
    nic_gbs: Annotated[float | None, typer.Option(help="NIC of a rank, GB/s one way.")] = None,
    skew: Annotated[
        float, typer.Option(min=0.0, help="Popularity of experts: 1 / place ** skew.")
    ] = 0.0,
    max_nodes: Annotated[
        int | None, typer.Option(min=1, help="Most nodes that a token's experts lie on.")
    ] = None,
    node_reduction: Annotated[
        bool, typer.Option(help="Nodes add a token's rows before combine: other bits.")
    ] = False,
    rank_reduction: Annotated[
        bool, typer.Option(help="On one node ranks add a token's rows: other bits.")
    ] = False,
    chunks: Annotated[int, typer.Option(min=1, help="Pieces of what a rank sends to a node.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the routing.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Predict dispatch and combine on a cluster: time, bytes per link, heap, control rows."""
    with in_a_sentence("model"):
        machine = CLUSTERS[cluster]
        overrides = {"hbm_gbs": hbm_gbs, "nvlink_gbs": nvlink_gbs, "nic_gbs": nic_gbs}
        for name, value in overrides.items():
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be > 0, got {value}")
        machine = dataclasses.replace(
            machine, **{name: value for name, value in overrides.items() if value is not None}
        )
        stated = Cluster(machine=machine, num_nodes=nodes, num_local_ranks=local_ranks)
        if stated.num_ranks > MAX_RANKS:
            raise ValueError(f"at most {MAX_RANKS} ranks are simulated, got {stated.num_ranks}")
        if rank_reduction and nodes > 1:
            raise ValueError(f"--rank-reduction is of one node, got {nodes} nodes")
        workload = Workload(
            num_tokens=tokens,
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            dispatch=Movement(
                element_bytes=WIRE_BYTES[wire],
                is_once_per_node=True,
                # Rows from another node are fanned out into every slot.
                is_once_per_rank=stated.num_nodes == 1,
            ),
            combine=Movement(
                element_bytes=2.0,
                is_once_per_node=node_reduction,
                is_once_per_rank=node_reduction or rank_reduction,
            ),
            max_nodes=max_nodes,
        )
        predictions = predict(workload, stated, skew=skew, seed=seed, num_chunks=chunks)
        heap = _heap_bytes(workload, stated, wire)
        if as_json:
            document = {
                "cluster": dataclasses.asdict(stated),
                "workload": dataclasses.asdict(workload),
                "operations": [dataclasses.asdict(prediction) for prediction in predictions],
                "heap_bytes": heap,
            }
            typer.echo(json.dumps(document, indent=1))
            return
        console = wide_console()
        console.print(_table(predictions, stated))
        typer.echo(f"heap of one rank, rows of one layer alive: {heap / 1e6:,.1f} MB")


def _heap_bytes(workload: Workload, cluster: Cluster, wire: WireName) -> int:
    """Windows of one layer that are alive together, with the sizes of `moe-comm budget`."""
    dispatched_row_bytes, scales = quantized_sizes(workload.hidden, QUANTIZATIONS[wire])
    sizes = formulas.window_sizes(
        num_ranks=cluster.num_ranks,
        num_tokens=workload.num_tokens,
        num_topk=workload.num_topk,
        num_experts=workload.num_experts,
        num_local_experts=workload.num_experts // cluster.num_ranks,
        row_bytes=workload.hidden * 2,
        dispatched_row_bytes=dispatched_row_bytes,
        scales=scales,
        spans_devices=cluster.num_nodes == 1 < cluster.num_local_ranks,
        rank_reduction=cluster.num_nodes == 1 and workload.combine.is_once_per_rank,
    )
    return sizes.dispatched + sizes.expert_output + sizes.sums + sizes.control


def _table(predictions: list[OperationPrediction], cluster: Cluster) -> FoldedTable:
    table = Table(
        title=f"{cluster.num_nodes} nodes of {cluster.num_local_ranks} ranks, mean bytes of one rank",
        title_justify="left",
    )
    table.add_column("operation")
    for name in (
        "memory MB",
        "NVLink MB",
        "NIC MB",
        "control rows kB",
        "bound us",
        "bound by",
        "simulated us",
        "rows us",
        "busy NIC/NVLink/HBM",
    ):
        table.add_column(name, justify="right")
    for one in predictions:
        simulated = one.simulated
        table.add_row(
            one.operation,
            *(
                f"{num_bytes / 1e6:,.1f}"
                for num_bytes in (one.mean_bytes.memory, one.mean_bytes.nvlink, one.mean_bytes.nic)
            ),
            f"{one.mean_bytes.count_rows / 1e3:,.1f}",
            f"{one.bound_us:,.0f}",
            one.bound_by,
            f"{simulated.time_us:,.0f}",
            f"{simulated.rows_us:,.0f}",
            f"{simulated.nic_busy:.2f} / {simulated.nvlink_busy:.2f} / {simulated.memory_busy:.2f}",
        )
    return FoldedTable(table)
