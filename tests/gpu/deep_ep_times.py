"""DeepEP and this package in turns, on the same tokens: the last line is a JSON document.

Every rank is a process, on the GPUs in turn. Exits with 4 where no DeepEP is installed.

    python tests/gpu/deep_ep_times.py --ranks 4 --tokens 4096
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_comm import Layout  # noqa: E402
from moe_comm.cli.bench.case import BenchCase  # noqa: E402
from moe_comm.testing import close_workers, run_ranks  # noqa: E402
from tests.helpers.deep_ep_rounds import compare, missing_deep_ep  # noqa: E402

MISSING = 4
NUM_ROUNDS = 9
NUM_CALLS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layout", default="rank-major", choices=["rank-major", "low-latency"])
    options = parser.parse_args()
    missing = missing_deep_ep()
    if missing is not None:
        print(missing)  # noqa: T201
        return MISSING
    case = BenchCase(
        num_ranks=options.ranks,
        num_tokens=options.tokens,
        hidden=options.hidden,
        num_topk=options.topk,
        num_experts=options.experts,
        layout=Layout[options.layout.replace("-", "_").upper()],
    )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    per_rank = run_ranks(compare, options.ranks, case, device_type, NUM_ROUNDS, NUM_CALLS)
    close_workers()
    times_us = {
        operation: {
            name: max(of_rank["times_us"][operation][name] for of_rank in per_rank)
            for name in first
        }
        for operation, first in per_rank[0]["times_us"].items()
    }
    for operation, times in times_us.items():
        shown = "  ".join(f"{name} {time_us:.1f}" for name, time_us in times.items())
        print(f"{operation:17} us: {shown}")  # noqa: T201
    found = {"bytes": per_rank[0]["bytes"], "times_us": times_us}
    print(json.dumps({**vars(options), "device": device_type, **found}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
