"""The picture of the README: recorded results as SVG, for light and for dark pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from benchmarks.recorded import Recorded, machine_line, mpi_names
from moe_comm.cli.bench.report import LABELS
from moe_comm.cli.bench.svg import (
    BAR,
    MARGIN,
    TICK,
    Palette,
    axis_label,
    bar,
    foot,
    head,
    notes_height,
    text_at,
    vertical,
)

DISPATCH_COMBINE = "train_4_ranks"
RESHARD = "reshard_tp2_ep2_to_tp4"
PEER_NAMES = {"gloo": "Gloo", "mpi": "MPI"}
RESHARD_LABELS = {"heap": "reshard, in place", "outside": "reshard, ordinary tensors"}

# Pixels; text of common fonts is at most as wide as the room for it.
TOP = 86
ROW = 54
BAR_GAP = 4
RATIO_LEFT, RATIO_WIDTH = 224, 300
ROOF_LEFT, ROOF_WIDTH = 640, 156


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One operation.

    Args:
        label: What it is.
        detail: Its size.
        speedup: How many times as fast as each peer, by its name.
        fraction_of_roof: Of the memory roof.
    """

    label: str
    detail: str
    speedup: Mapping[str, float]
    fraction_of_roof: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn, without its colors.

    Args:
        title: On top.
        groups: From top to bottom.
        notes: Lines at the foot: machine, roof and peers.
    """

    title: str
    groups: tuple[RowGroup, ...]
    notes: tuple[str, ...]


def picture_of(results: Mapping[str, Recorded]) -> Picture:
    """Dispatch, combine and a reshard between 4 ranks, of the standard cases of `benchmarks/run_suite.sh`.

    Raises:
        ValueError: One of the two files is missing, has no roof, or they come from different machines.
    """
    for name in (DISPATCH_COMBINE, RESHARD):
        if name not in results:
            raise ValueError(f"the picture needs {name}.json; there are {', '.join(results)}")
    rows, weights = results[DISPATCH_COMBINE], results[RESHARD]
    machine = machine_line((rows, weights))
    dispatch, heap = rows.case("dispatch"), weights.case("reshard", destination="heap")
    details = {
        "dispatch": f"{dispatch['tokens']} tokens a rank, hidden {dispatch['hidden']}",
        "combine": "experts' output in the heap",
        "combine_copy_in": "experts' output outside it",
        "heap": f"{heap['model_bytes'] / 2**30:.1f} GiB, {heap['from']} to {heap['to']}",
        "outside": "the same, through slots",
    }
    cases = [(op, LABELS[op], rows.case(op)) for op in ("dispatch", "combine", "combine_copy_in")]
    cases += [
        (where, label, weights.case("reshard", destination=where))
        for where, label in RESHARD_LABELS.items()
    ]
    for op, _, case in cases:
        if case["fraction_of_roof"] is None:
            raise ValueError(f"the picture needs the roof of {op}, and the results have none")
        if case["ranks"] != dispatch["ranks"]:
            raise ValueError(f"{op} ran on {case['ranks']} ranks, dispatch on {dispatch['ranks']}")
    return Picture(
        title=f"Dispatch, combine and reshard between {dispatch['ranks']} ranks of one machine",
        groups=tuple(
            RowGroup(
                label=label,
                detail=details[op],
                speedup={
                    peer: case["speedup"][peer] for peer in PEER_NAMES if peer in case["speedup"]
                },
                fraction_of_roof=case["fraction_of_roof"],
            )
            for op, label, case in cases
        ),
        notes=(
            f"Medians of {dispatch['ranks']} processes on {machine}; {dispatch['dtype']}, "
            f"top-{dispatch['topk']} of {dispatch['experts']} experts; moe_comm {rows.environment['version']}.",
            "Roof: plain streaming copies that read and write the same bytes in the same mix, timed around every call.",
            f"Peers: tuned pipelines over torch.distributed (Gloo) and over {mpi_names([rows])} (MPI) that deliver the same",
            "rows; for reshard, the Gloo copy service of moe_comm with the same plan.",
        ),
    )


def draw(picture: Picture, palette: Palette) -> str:
    """The picture as the text of an SVG file; the page shows through its background."""
    bottom = TOP + ROW * len(picture.groups)
    height = bottom + notes_height(picture.notes)
    top = max((ratio for group in picture.groups for ratio in group.speedup.values()), default=1.0)
    step = _tick_step(max(top, 1.0))
    num_ticks = math.ceil(max(top, 1.0) / step)
    unit = RATIO_WIDTH / (num_ticks * step)
    lines = [
        *head(picture.title, " ".join(_in_words(picture)), height, palette),
        text_at(
            RATIO_LEFT,
            58,
            "times as fast as a peer that delivers the same",
            palette.text,
            weight=600,
        ),
        text_at(ROOF_LEFT, 58, "share of the memory roof", palette.text, weight=600),
    ]
    for tick in range(num_ticks + 1):
        x = RATIO_LEFT + tick * step * unit
        lines.append(vertical(x, bottom, bottom + TICK, palette.muted))
        lines.append(axis_label(x, bottom, f"{tick * step:g}", palette))
    for percent in (0, 50, 100):
        x = ROOF_LEFT + ROOF_WIDTH * percent / 100
        lines.append(vertical(x, bottom, bottom + TICK, palette.muted))
        lines.append(axis_label(x, bottom, f"{percent} %", palette))
    for idx, group in enumerate(picture.groups):
        lines += _group(group, TOP + ROW * idx, unit, palette)
    for x in (RATIO_LEFT, ROOF_LEFT):
        lines.append(vertical(x, TOP - 8, bottom, palette.muted))
    # One times as fast as a peer, and all that memory can do.
    for x, name in ((RATIO_LEFT + unit, "equal"), (ROOF_LEFT + ROOF_WIDTH, "roof")):
        lines.append(vertical(x, TOP - 8, bottom, palette.text, dashes="2 3"))
        lines.append(text_at(x, TOP - 11, name, palette.muted, size=11, anchor="middle"))
    lines += foot(picture.notes, bottom, palette)
    return "\n".join([*lines, "</svg>", ""])


def _group(group: RowGroup, y: float, unit: float, palette: Palette) -> Iterator[str]:
    middle = y + (ROW - 10) / 2
    yield text_at(MARGIN, middle - 3, group.label, palette.text, size=14, weight=600)
    yield text_at(MARGIN, middle + 14, group.detail, palette.muted, size=12)
    high = BAR * len(group.speedup) + BAR_GAP * (len(group.speedup) - 1)
    for idx, (peer, ratio) in enumerate(group.speedup.items()):
        bar_y = middle - high / 2 + idx * (BAR + BAR_GAP)
        yield bar(RATIO_LEFT, bar_y, ratio * unit, palette.peers[peer])
        end = RATIO_LEFT + ratio * unit + 6
        yield text_at(end, bar_y + 13, _times(peer, ratio), palette.text)
    bar_y = middle - BAR / 2
    yield bar(ROOF_LEFT, bar_y, ROOF_WIDTH, palette.track)
    yield bar(ROOF_LEFT, bar_y, ROOF_WIDTH * group.fraction_of_roof, palette.roof)
    end = ROOF_LEFT + ROOF_WIDTH * max(group.fraction_of_roof, 1.0) + 6
    yield text_at(end, bar_y + 13, f"{group.fraction_of_roof:.0%}".replace("%", " %"), palette.text)


def _in_words(picture: Picture) -> Iterator[str]:
    for group in picture.groups:
        ratios = [f"{_times(peer, ratio)} as fast" for peer, ratio in group.speedup.items()]
        share = f"{group.fraction_of_roof:.0%} of the memory roof"
        yield f"{group.label} ({group.detail}): {', '.join([*ratios, share])}."
    yield from picture.notes


def _times(peer: str, ratio: float) -> str:
    return f"{ratio:.1f} x {PEER_NAMES[peer]}"


def _tick_step(top: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that needs at most 6 steps."""
    power = 1.0
    while True:
        for factor in (1.0, 2.0, 5.0):
            if top <= 6 * factor * power:
                return factor * power
        power *= 10.0
