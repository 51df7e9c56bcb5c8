"""Tables and JSON of `moe-comm reshard plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich import filesize
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_comm.cli.command_rules import FoldedTable
from moe_comm.cli.reshard.shapes import describe
from moe_comm.cli.reshard.traffic import GB, Links, Traffic, predict, schedule_steps
from moe_comm.cli.reshard.world import PlanningCase

NUM_LARGEST_PAIRS = 8


def shape_title(case: PlanningCase) -> str:
    """Model and layouts on one line."""
    sides = [f"{layout} on {layout.num_ranks} ranks" for layout in (case.source, case.destination)]
    where = "disjoint" if case.is_disjoint else "collocated"
    return f"{describe(case.shape)}: {sides[0]} to {sides[1]}, {where}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldReport:
    """Report of a planned reshard.

    Args:
        case: Model and layouts.
        traffic: Traffic of the ranks that were planned.
        planned_ranks: Destination ranks whose plans were made and verified.
        are_pairs_verified: Whether both ends of every piece were compared.
        links: Links for predicted times.
        slot_bytes: Most bytes that a pair moves in a step.
        plan_s: Seconds for metadata and plans.
    """

    case: PlanningCase
    traffic: Traffic
    planned_ranks: Sequence[int]
    are_pairs_verified: bool
    links: Links
    slot_bytes: int
    plan_s: float

    @property
    def is_whole(self) -> bool:
        """Return whether every destination rank was planned, so that sums of senders are whole too."""
        return len(self.planned_ranks) == self.case.destination.num_ranks

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON writes it."""
        case, traffic = self.case, self.traffic
        return {
            "shape": dataclasses.asdict(case.shape),
            "from": str(case.source),
            "to": str(case.destination),
            "source_ranks": case.source.num_ranks,
            "destination_ranks": case.destination.num_ranks,
            "disjoint": case.is_disjoint,
            "source_dtype": str(case.source_dtype).removeprefix("torch."),
            "destination_dtype": str(case.destination_dtype).removeprefix("torch."),
            "model_bytes": case.shape.num_bytes(case.destination_dtype),
            "planned_ranks": list(self.planned_ranks),
            "is_whole": self.is_whole,
            "are_pairs_verified": self.are_pairs_verified,
            "total_bytes": traffic.total_bytes,
            "local_bytes": traffic.local_bytes,
            "num_pieces": sum(traffic.pieces_per_rank.values()),
            "pieces_per_rank": {str(rank): n for rank, n in traffic.pieces_per_rank.items()},
            "sent_bytes": _by_text(traffic.sent_per_rank()) if self.is_whole else None,
            "received_bytes": _by_text(traffic.received_per_rank()),
            "bytes_per_pair": [
                {"source": src, "destination": dst, "bytes": num_bytes}
                for (src, dst), num_bytes in sorted(traffic.bytes_per_pair.items())
            ],
            "slot_bytes": self.slot_bytes,
            "steps": self._steps(),
            "links": dataclasses.asdict(self.links),
            "predicted": predict(traffic, self.links).to_dict(),
            "plan_s": self.plan_s,
        }

    def render(self) -> Group:
        """Two tables and what they are of."""
        title = Text(shape_title(self.case), style="italic")
        return Group(
            title, self._summary(), pairs_table(self.traffic, NUM_LARGEST_PAIRS), *self._notes()
        )

    def _steps(self) -> dict[str, int]:
        return schedule_steps(self.traffic.bytes_per_pair, self.slot_bytes)

    def _summary(self) -> FoldedTable:
        case, traffic = self.case, self.traffic
        table = Table(show_header=False)
        table.add_column("what")
        table.add_column("value", justify="right")
        received = traffic.received_per_rank()
        sent = traffic.sent_per_rank()
        pieces = traffic.pieces_per_rank
        links, times = self.links, predict(traffic, self.links)
        for what, value in (
            ("predicted, written in place", times.full_duplex_ms),
            ("predicted, through slots", times.slots_ms),
            ("predicted, through slots, half-duplex", times.half_duplex_ms),
        ):
            table.add_row(what, f"{value:,.2f} ms")
        table.add_section()
        table.add_row("one model", size_text(case.shape.num_bytes(case.destination_dtype)))
        table.add_row("written to destinations", size_text(traffic.total_bytes))
        table.add_row("of it copied within a rank", size_text(traffic.local_bytes))
        table.add_row(
            "pairs of ranks", f"{sum(src != dst for src, dst in traffic.bytes_per_pair):,}"
        )
        table.add_row(
            "pieces; largest rank", f"{sum(pieces.values()):,}; {max(pieces.values(), default=0):,}"
        )
        table.add_row("received by a rank: mean, largest, largest / mean", _spread(received))
        if self.is_whole:
            table.add_row("sent by a rank: mean, largest, largest / mean", _spread(sent))
        table.add_section()
        steps = self._steps()
        slots = f"steps of {size_text(self.slot_bytes)} a pair"
        table.add_row(f"{slots}, full-duplex", f"{steps['full_duplex']:,}")
        table.add_row(f"{slots}, half-duplex, at least", f"{steps['half_duplex']:,}")
        table.add_section()
        for what, value in (
            (
                f"links in a node of {links.ranks_per_node}, {links.intranode_gbs:g} GB/s",
                times.intranode_ms,
            ),
            (f"links between nodes, {links.internode_gbs:g} GB/s", times.internode_ms),
            (f"memory, {links.memory_gbs:g} GB/s", times.memory_ms),
        ):
            table.add_row(what, f"{value:,.2f} ms")
        return FoldedTable(table)

    def _notes(self) -> list[Text]:
        num_all = self.case.destination.num_ranks
        planned = (
            f"all {num_all} destination ranks"
            if self.is_whole
            else f"{len(self.planned_ranks)} of {num_all} destination ranks "
            f"({', '.join(map(str, self.planned_ranks))}): sums are of these alone, steps and times "
            "are what these need at least; --sample 0 plans all"
        )
        verified = "every destination element is written exactly once"
        if self.are_pairs_verified:
            verified += ", both ends of every piece agree"
        return [Text(f"planned in {self.plan_s:.1f} s: {planned}"), Text(f"verified: {verified}")]


def pairs_table(traffic: Traffic, count: int) -> FoldedTable:
    """Bytes of the pairs of ranks that move most."""
    ordered = sorted(traffic.bytes_per_pair.items(), key=lambda item: (-item[1], item[0]))
    table = Table(title="largest pairs", title_justify="left")
    for name in ("from", "to", "bytes"):
        table.add_column(name, justify="right")
    table.add_column("")
    for (src, dst), num_bytes in ordered[:count]:
        table.add_row(str(src), str(dst), size_text(num_bytes), "same rank" if src == dst else "")
    return FoldedTable(table)


def _by_text(per_rank: Mapping[int, int]) -> dict[str, int]:
    return {str(rank): num_bytes for rank, num_bytes in per_rank.items()}


def size_text(num_bytes: float) -> str:
    """Bytes for people."""
    if num_bytes >= GB:
        return f"{num_bytes / GB:,.2f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:,.2f} MB"
    return filesize.decimal(int(num_bytes))


def _spread(per_rank: Mapping[int, int]) -> str:
    if not per_rank:
        return "-"
    mean = sum(per_rank.values()) / len(per_rank)
    largest = max(per_rank.values())
    return f"{size_text(mean)}, {size_text(largest)}, {largest / mean:.2f}"
