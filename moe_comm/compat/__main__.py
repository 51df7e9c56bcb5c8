"""Run programs that import neither moe_comm nor anything that does.

    python -m moe_comm.compat run train.py --steps 10
    torchrun --nproc-per-node=4 -m moe_comm.compat run -m package.train
    python -m moe_comm.compat enable      # then: MOE_COMM_COMPAT=deep_ep python train.py

`run` installs what `MOE_COMM_COMPAT` names, or deep_ep, and runs the program as Python would. `enable` writes a line into the
site-packages of this environment that installs what `MOE_COMM_COMPAT` names at the start of Python, where
it is set; `disable` removes it.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import sysconfig
from pathlib import Path

from moe_comm import compat

_PTH_NAME = "moe_comm_compat.pth"
_PTH_LINE = (
    "import os; os.environ.get('MOE_COMM_COMPAT') "
    "and __import__('moe_comm.compat').compat.install_from_environment()\n"
)


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m moe_comm.compat")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="install what MOE_COMM_COMPAT names, or deep_ep, then run a program"
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    run.add_argument("program", metavar="PROGRAM")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    for name in ("enable", "disable"):
        command = commands.add_parser(name, help=f"{name} MOE_COMM_COMPAT in this environment")
        command.add_argument("--site-packages", type=Path, default=None, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.command == "run":
        _run(options.program, options.arguments, is_module=options.module)
    else:
        folder = options.site_packages or Path(sysconfig.get_path("purelib"))
        _set_enabled(folder / _PTH_NAME, options.command == "enable")


def _run(program: str, arguments: list[str], *, is_module: bool) -> None:
    compat.install_from_environment()
    if not compat.installed():
        compat.install("deep_ep")
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    # A script finds its neighbors, not those of the folder this was started in.
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def _set_enabled(path: Path, is_enabled: bool) -> None:
    if is_enabled:
        path.write_text(_PTH_LINE)
    else:
        path.unlink(missing_ok=True)
    sys.stdout.write(f"{path} {'written' if is_enabled else 'removed'}\n")


if __name__ == "__main__":
    main()
