"""Every operation once on a GPU, compared with the CPU backend: whether it runs, and for compute-sanitizer.

python tests/gpu/one_round.py --ranks 2 --mode processes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_comm.testing import close_workers  # noqa: E402
from moe_comm.testing.case_list import CASES  # noqa: E402
from moe_comm.testing.cases import Case  # noqa: E402
from moe_comm.testing.conformance import check_case  # noqa: E402
from moe_comm.testing.target import Target  # noqa: E402
from tests.helpers.on_device import connect_to_gpu, make_on_gpu  # noqa: E402


def kind_of(case: Case) -> tuple[object, ...]:
    """Layout, and the format of rows with the order of their scale factors."""
    quantization = case.quantization
    if quantization is None:
        return case.layout, case.pair is not None
    return case.layout, quantization.format, quantization.is_column_major


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", choices=["threads", "processes"], default="threads")
    parser.add_argument("--cases", type=int, help="so many at most, of different layouts first")
    parser.add_argument("--formats", action="store_true", help="one of every layout and format")
    options = parser.parse_args()
    first_of: dict[tuple[object, ...], Case] = {}
    for case in CASES:
        if case.num_ranks == options.ranks:
            first_of.setdefault(kind_of(case) if options.formats else (case.layout,), case)
    cases = list(first_of.values())[: options.cases]
    target = Target(name="cuda", make=make_on_gpu, connect=connect_to_gpu)
    for case in cases:
        print(case.name, flush=True)  # noqa: T201
        check_case(target, case, mode=options.mode)
        print(case.name, "ok", flush=True)  # noqa: T201
    close_workers()
    return 0 if cases else 1


if __name__ == "__main__":
    sys.exit(main())
