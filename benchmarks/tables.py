"""Recorded results as the Markdown tables of `docs/measured.md`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import Recorded, machine_line, mpi_names
from moe_comm.cli.bench.parts import PARTS
from moe_comm.cli.bench.report import LABELS

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"

# What a case is compared with that is no peer: the same call without what the case asks for.
BASELINES = {
    "unquantized": "the same rows unquantized",
    "native": "the native call",
    "expert_major": "`EXPERT_MAJOR`",
    "unreduced": "rows that cross one by one",
    "unchecked": "messages without checksums",
}
# Frameworks whose clients are timed in turns with its own exchange, which is the peer: and a column for
# each of these phases.
_BOTH_WAYS = {"forward": "forward", "step": "forward and backward"}
FRAMEWORKS = {
    "megatron": (
        "Times as fast as Megatron's all-to-all dispatcher over Gloo",
        "alltoall_gloo",
        _BOTH_WAYS,
    ),
    "transformers": (
        'Times as fast as transformers\' `"all_to_all"` over Gloo',
        "all_to_all_gloo",
        _BOTH_WAYS,
    ),
    "vllm": (
        "Times as fast as a layer of vLLM that gathers whole batches over Gloo",
        "whole_batches_gloo",
        {"layer": "layer", "prepare": "prepare", "experts": "experts", "finalize": "finalize"},
    ),
}
CLIENTS = {
    "expert_parallel": "tokens sent to their experts by this package",
    "whole_batches": "whole batches gathered by this package",
    "ep_implementation": "the implementation of this package",
    "flex_manager": "Megatron's flex dispatcher with the manager of this package",
    "flex_hybridep": "Megatron's flex dispatcher, `hybridep`, over the `deep_ep` of this package",
    "flex_deepep": "Megatron's flex dispatcher, `deepep` (permutes in torch), over the `deep_ep` of this package",
    "own_dispatcher": "the dispatcher of this package",
}

Case = dict[str, Any]
Row = tuple[Recorded, Case]
Table = Callable[[Sequence[Row]], str]


def markdown_tables(results: Mapping[str, Recorded]) -> str:
    """Every recorded case once, in a table of its kind; a kind that was not recorded has no table.

    Raises:
        ValueError: The files of a table come from different machines, or a case is of no known kind.
    """
    sorted_in: dict[Table, list[Row]] = {table: [] for table in TABLES}
    for recorded in results.values():
        for case in recorded.cases:
            table = _table_of(recorded.name, case)
            if table is not None:
                sorted_in[table].append((recorded, case))
    of_machine: dict[str, list[Table]] = {}
    for table, rows in sorted_in.items():
        if rows:
            machine = machine_line(recorded for recorded, _ in rows)
            of_machine.setdefault(machine, []).append(table)
    parts = []
    for machine, tables in of_machine.items():
        found = {r.name: r.environment["version"] for table in tables for r, _ in sorted_in[table]}
        versions, files = sorted(set(found.values())), ", ".join(f"`{name}`" for name in found)
        parts += [f"Machine: {machine}. Recorded with moe_comm {', '.join(versions)}, in {files}."]
        parts += [table(sorted_in[table]) for table in tables]
    return "\n\n".join(parts)


def write_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the two marks of a page.

    Raises:
        ValueError: The page does not have both marks, once each and in order.
    """
    content = page.read_text(encoding="utf-8")
    before, _, rest = content.partition(BEGIN + "\n")
    _, _, after = rest.partition(END)
    if content.count(BEGIN) != 1 or content.count(END) != 1 or not rest or END not in rest:
        raise ValueError(
            f"{page} must have {BEGIN} and after it {END}, each once and on its own line"
        )
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _table_of(name: str, case: Case) -> Table | None:
    """The table that has a row for a case; None for what stands in another case's row, or only in its file."""
    op = case["op"]
    if op == "fixed_cost" or (op == "sweep" and case["tokens"] not in _SWEEP_ROWS):
        return None
    if op in _TABLES_OF_OPS:
        return _TABLES_OF_OPS[op]
    framework = op.split("_")[0]
    if framework in FRAMEWORKS:
        has_row = op == f"{framework}_{_row_phase(framework)}" and bool(case["speedup"])
        return _CLIENT_TABLES[framework] if has_row else None
    if op in ("memory", "differentiable_overhead"):
        return None
    if op not in LABELS:
        raise ValueError(f"{name}.json: no table shows the operation {op!r}")
    if BASELINES.keys() & case["speedup"].keys():
        return _baseline_table
    if op == "dispatch+combine":
        return _decode_table
    return _node_table if "local_ranks" in case else _row_table


class _Columns:
    """A table of cases by its columns: a heading, and the cell of a case.

    Args:
        title: Above it.
        cells: By heading; spaces behind a heading tell it from another of the same words.
    """

    def __init__(self, title: str, cells: Mapping[str, Callable[[Case], str]]) -> None:
        self._title = title
        self._cells = cells

    def __call__(self, rows: Sequence[Row]) -> str:
        peers = mpi_names(recorded for recorded, _ in rows)
        head = [heading.strip().format(mpi=peers) for heading in self._cells]
        body = ([cell(case) for cell in self._cells.values()] for _, case in rows)
        return _table(self._title, head, body)


def _operation(case: Case) -> str:
    return LABELS[case["op"]]


def _p50_ms(case: Case) -> str:
    return _ms(case["p50_us"])


def _p50_us(case: Case) -> str:
    return _us(case["p50_us"])


def _of_roof(case: Case) -> str:
    return _share(case["fraction_of_roof"])


def _against(peer: str) -> Callable[[Case], str]:
    return lambda case: _ratio(case, peer)


def _shape(case: Case) -> str:
    return f"{case['ranks']} x {case['tokens']}, {case['hidden']}"


_SHAPE = "ranks x tokens, hidden"

_row_table = _Columns(
    "Dispatch and combine",
    {
        _SHAPE: _shape,
        "operation": _operation,
        "p50": _p50_ms,
        "of the roof": _of_roof,
        "against Gloo": _against("gloo"),
        "against {mpi}": _against("mpi"),
    },
)


def _decode_table(rows: Sequence[Row]) -> str:
    def overhead(case: Case) -> str:
        recorded = next(recorded for recorded, each in rows if each is case)
        return _us(_p50(recorded, "differentiable_overhead"))

    return _Columns(
        "Small batches",
        {
            _SHAPE: _shape,
            "dispatch + combine from Python, p50": _p50_us,
            "against Gloo": _against("gloo"),
            "against {mpi}": _against("mpi"),
            "more per differentiable dispatch": overhead,
        },
    )(rows)


def _part(name: str) -> Callable[[Case], str]:
    return lambda case: f"{case['parts_us'][name]:.1f} us"


# Tokens of the sizes that have a row; a sweep has every power of two.
_SWEEP_ROWS = (1, 8, 64, 512, 4096)
_sweep_table = _Columns(
    "Parts of a call",
    {
        _SHAPE: _shape,
        "dispatch + combine, p50": _p50_us,
        "of the roof": _of_roof,
        **{name: _part(name) for name in PARTS},
        "differentiable": lambda case: f"{case['differentiable_ratio']:.1f} x",
        "threads": lambda case: f"{case['threads_ratio']:.2f} x",
    },
)


def _baseline(case: Case) -> str:
    return next(name for name in BASELINES if name in case["speedup"])


def _baseline_time(case: Case, us: float) -> str:
    return _us(us) if case["op"] == "dispatch+combine" else _ms(us)


_baseline_table = _Columns(
    "Against the plain call",
    {
        _SHAPE: _shape,
        "case": lambda case: _asked_for(case),
        "operation": _operation,
        "p50": lambda case: _baseline_time(case, case["p50_us"]),
        "in turns with": lambda case: BASELINES[_baseline(case)],
        "p50 ": lambda case: _baseline_time(case, case["peer_p50_us"][_baseline(case)]),
        "times as fast": lambda case: f"{case['speedup'][_baseline(case)]:.2f}",
    },
)

_node_table = _Columns(
    "One machine as several nodes",
    {
        _SHAPE: _shape,
        "nodes, rail": lambda case: (
            f"{case['ranks'] // case['local_ranks']} of {case['local_ranks']} ranks, {case['rail']}"
        ),
        "operation": _operation,
        "p50": _p50_ms,
        "MB between nodes": lambda case: f"{case['internode_bytes'] / 1e6:.1f}",
        'against `backend="collective"`': _against("collective"),
    },
)


def _row_phase(framework: str) -> str:
    """The phase whose case stands for those of its client's others."""
    return next(iter(FRAMEWORKS[framework][2]))


def _client_table(framework: str, rows: Sequence[Row]) -> str:
    title, peer, phases = FRAMEWORKS[framework]
    head = (_SHAPE, "client", *phases.values())
    body = []
    for recorded, case in rows:
        client = str(case["client"])
        timed = (recorded.case(f"{framework}_{phase}", client=client) for phase in phases)
        cells = (_ratio(one, peer) for one in timed)
        body.append((_shape(case), CLIENTS.get(client, client), *cells))
    return _table(title, head, body)


_CLIENT_TABLES = {name: functools.partial(_client_table, name) for name in FRAMEWORKS}


_DESTINATIONS = {
    "heap": "in the heap",
    "shared": "outside it, shared in place",
    "outside": "outside it, through slots",
}


_reshard_table = _Columns(
    "Reshard",
    {
        "weights, second reshard of the same models": lambda case: _weights(case),
        "destination": lambda case: _DESTINATIONS[case["destination"]],
        "p50": _p50_ms,
        "of the copy roof": _of_roof,
        "against Gloo on the same plan": _against("gloo"),
        "whole tensors by name": _against("full-tensors"),
        "outside the copies": lambda case: _ms(case["outside_copies_us"]),
    },
)

_TABLES_OF_OPS: dict[str, Table] = {
    "reshard": _reshard_table,
    "sweep": _sweep_table,
}

TABLES: tuple[Table, ...] = (
    _row_table,
    _decode_table,
    _sweep_table,
    _baseline_table,
    _node_table,
    *_CLIENT_TABLES.values(),
    _reshard_table,
)


def _table(title: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(cells)} |" for cells in body]
    return "\n".join(lines)


def _asked_for(case: Case) -> str:
    """What a case asks for besides the plain call, in a few words."""
    words = []
    if case["quantization"] is not None:
        order = ", column-major" if case["column_major_scales"] else ""
        words.append(f"`{case['quantization']}`, `{case['scale_format']}` scales{order}")
    if case["api"] != "native":
        words.append("HybridEP's functions: routing map in, permuted rows out")
    if case["layout"] != "EXPERT_MAJOR":
        words.append(f"`{case['layout']}`")
    if case.get("node_reduction"):
        words.append(f"`node_reduction`, {_nodes(case)}")
    if case.get("rank_reduction"):
        words.append("`rank_reduction`")
    if case.get("check_messages"):
        words.append(f"`check_messages`, {_nodes(case)}")
    return "; ".join(words)


def _nodes(case: Case) -> str:
    num_nodes = case["ranks"] // case["local_ranks"]
    return f"{num_nodes} nodes of {case['local_ranks']} ranks over {case['rail']}"


def _weights(case: Case) -> str:
    shape = case["shape"]
    if "num_tensors" in shape:
        size = case["model_bytes"] / shape["num_tensors"] / 1024
        what = f"{shape['num_tensors']:,} tensors of {size:g} KiB"
    else:
        what = f"{case['model_bytes'] / 2**30:.1f} GiB"
        if case.get("stacked_experts"):
            what += f" of layers of {shape['num_experts']} stacked experts"
    if case["disjoint"]:
        others = "other" if case["destination_ranks"] == 1 else "others"
        where = f"{case['source_ranks']} ranks to {case['destination_ranks']} {others}"
    else:
        where = f"{case['ranks']} ranks"
    return f"{what}, {case['from']} to {case['to']}, {where}"


def _p50(recorded: Recorded, op: str) -> float | None:
    return next((case["p50_us"] for case in recorded.cases if case["op"] == op), None)


def _ratio(case: Case, peer: str) -> str:
    return f"{case['speedup'][peer]:.1f} x" if peer in case["speedup"] else "-"


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.2f}"


def _ms(value_us: float | None) -> str:
    return "-" if value_us is None else f"{value_us / 1e3:.1f} ms"


def _us(value_us: float | None) -> str:
    return "-" if value_us is None else f"{value_us:.0f} us"
