"""Every operation once on a GPU, compared with the CPU backend; what compute-sanitizer watches.

python tests/gpu/one_round.py --ranks 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_comm.testing import close_workers  # noqa: E402
from moe_comm.testing.case_list import CASES  # noqa: E402
from moe_comm.testing.conformance import check_case  # noqa: E402
from moe_comm.testing.target import Target  # noqa: E402
from tests.helpers.on_device import connect_to_gpu, make_on_gpu  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    target = Target(name="cuda", make=make_on_gpu, connect=connect_to_gpu)
    cases = [case for case in CASES if case.num_ranks == options.ranks][::8]
    for case in cases:
        check_case(target, case, mode="processes" if options.ranks > 1 else "threads")
        print(case.name, "ok", flush=True)  # noqa: T201
    close_workers()
    return 0 if cases else 1


if __name__ == "__main__":
    sys.exit(main())
