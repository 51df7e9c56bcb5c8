"""Wires the commands together."""

from __future__ import annotations

import typer

from moe_comm.cli.bench_command import bench_app
from moe_comm.cli.budget_command import budget
from moe_comm.cli.checkpoint_command import checkpoint_app
from moe_comm.cli.command_rules import PIPE_WIDTH, CommandGroup, example, sectioned
from moe_comm.cli.commands import COMMANDS, EXAMPLE, SUMMARY
from moe_comm.cli.doctor_command import doctor
from moe_comm.cli.model_command import model
from moe_comm.cli.reshard_command import reshard_app
from moe_comm.cli.trace_command import trace_app

# Plain help: boxes of rich cut the names of options where a terminal is narrow.
app = typer.Typer(
    name="moe-comm",
    cls=CommandGroup,
    help=SUMMARY,
    epilog=example(EXAMPLE),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": PIPE_WIDTH},
)
app.add_typer(bench_app, name="bench", short_help=COMMANDS["bench"])
app.command(short_help=COMMANDS["doctor"], epilog=example("moe-comm doctor --json"))(doctor)
app.command(
    cls=sectioned(
        {
            "Training": "moe_layers microbatches recompute weights_in_combine imbalance worst_case",
            "Rows": "layout alignment quantization scale_format column_major_scales capacity_rows "
            "capacity_rows_per_expert",
            "Nodes and GPUs": "local_ranks node_reduction rank_reduction across_gpus",
        }
    ),
    short_help=COMMANDS["budget"],
    epilog=example("moe-comm budget --ranks 8 --tokens 4096 --hidden 7168 --experts 256"),
)(budget)
app.command(
    short_help=COMMANDS["model"],
    epilog=example("moe-comm model --nodes 4 --cluster h200-cx7 --wire fp8_block128"),
)(model)
app.add_typer(reshard_app, name="reshard", short_help=COMMANDS["reshard"])
app.add_typer(checkpoint_app, name="checkpoint", short_help=COMMANDS["checkpoint"])
app.add_typer(trace_app, name="trace", short_help=COMMANDS["trace"])
