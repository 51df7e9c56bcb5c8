"""Weights of experts on their way to another placement, beside a plain copy of as many bytes, in turns.

Run from the root of the repository:

    python -m benchmarks.replica_copies --ranks 2 --bytes 256MiB --json out.json

Every rank has slots in ordinary memory, a quarter of which changes. "replaced" slots hold another expert, so
bytes wait in the heap for the commit, which copies them; "empty" ones get them at once, and "shared" ones are
empty slots of memory that `share_in_place` has shared with peers. See docs/replicas.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from moe_comm import Communicator, Placement, _host
from moe_comm.cli.bench.environment import collect_environment
from moe_comm.cli.options import parse_bytes
from moe_comm.replicas import ReplicaCopies, plan_replicas
from moe_comm.resharding import share_in_place
from moe_comm.testing import RankContext, run_ranks

NUM_CHANGED = 4
NUM_KEPT = 12
Interval = tuple[int, int]


def placements(num_ranks: int) -> dict[str, tuple[Placement, Placement]]:
    """Every rank keeps some experts, and gets those of the rank after it in its other slots."""
    num_experts = num_ranks * NUM_KEPT
    own = [[rank * NUM_KEPT + i for i in range(NUM_KEPT)] for rank in range(num_ranks)]
    table: dict[str, list[list[int]]] = {"empty": [], "present": [], "wanted": []}
    for rank in range(num_ranks):
        after = own[(rank + 1) % num_ranks]
        table["empty"].append([*own[rank], *[-1] * NUM_CHANGED])
        table["present"].append([*own[rank], *after[:NUM_CHANGED]])
        table["wanted"].append([*own[rank], *after[NUM_CHANGED : 2 * NUM_CHANGED]])
    made = {name: Placement(slots, num_experts) for name, slots in table.items()}
    return {
        "replaced": (made["present"], made["wanted"]),
        "empty": (made["empty"], made["wanted"]),
        "shared": (made["empty"], made["wanted"]),
    }


def measure(context: RankContext, num_bytes: int, num_repeats: int) -> dict[str, list[Interval]]:
    """When everything began and ended on this rank, by name."""
    comm = Communicator(context.group, backend="host")
    copies = ReplicaCopies(comm)
    slot_elements = num_bytes // NUM_CHANGED // 2
    layers = torch.nn.ParameterDict()
    for name in ("private", "shared"):
        memory = torch.empty(NUM_KEPT + NUM_CHANGED, slot_elements, dtype=torch.bfloat16)
        memory.copy_(torch.arange(slot_elements) % 97 + context.rank_idx)
        layers[name] = torch.nn.Parameter(memory, requires_grad=False)
    shared = share_in_place(torch.nn.ParameterDict({"shared": layers["shared"]}), comm)
    parts = [torch.randint(255, (num_bytes,), dtype=torch.uint8).numpy() for _ in range(2)]
    found: dict[str, list[Interval]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        begin = time.perf_counter_ns()
        call()
        found.setdefault(name, []).append((begin, time.perf_counter_ns()))

    for _ in range(num_repeats):
        for name, (present, wanted) in placements(context.num_ranks).items():
            plan = plan_replicas(present, wanted)
            weights = layers["shared" if name == "shared" else "private"]
            timed("copy", lambda: _host.kernels.roof_copy(*parts))
            prefetch = copies.prefetch(plan, [weights], step_bytes=num_bytes)
            timed(f"{name}: prefetch", prefetch.step)
            timed(f"{name}: commit", prefetch.commit)
            timed("copy", lambda: _host.kernels.roof_copy(*parts))
            sources = weights[NUM_CHANGED : 2 * NUM_CHANGED, -1].float() - context.rank_idx
            after = (context.rank_idx + 1) % context.num_ranks
            assert torch.equal(weights[NUM_KEPT:, -1].float() - after, sources)
    shared.close()
    comm.destroy()
    return found


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=parse_bytes, default=256 << 20, help="received by a rank")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    by_rank = run_ranks(measure, given.ranks, given.bytes, given.repeats, fresh=True)
    milliseconds = {
        name: median(
            (max(end for _, end in turn) - max(begin for begin, _ in turn)) / 1e6
            for turn in zip(*(found[name] for found in by_rank), strict=True)
        )
        for name in by_rank[0]
    }
    for name, value in milliseconds.items():
        print(f"{name:20} {value:8.2f} ms  {milliseconds['copy'] / value:5.2f} of the copy")
    if given.json is not None:
        document = {
            "environment": collect_environment(),
            "ranks": given.ranks,
            "recv_bytes": given.bytes,
            "milliseconds": milliseconds,
        }
        given.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
