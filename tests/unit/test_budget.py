from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from moe_comm import budget
from moe_comm.cli.app import app
from moe_comm.config import EpConfig

MIB = 1 << 20


def test_rows() -> None:
    assert budget.expected_recv_rows(4096, 8, num_local_experts=8, expert_alignment=16) == 32888
    assert budget.expected_recv_rows(100, 2, imbalance=1.5) == 300
    assert budget.worst_case_recv_rows(8, 4096, 8, num_local_experts=8) == 262144
    assert budget.worst_case_recv_rows(8, 4096, 8, num_local_experts=2) == 65536
    with pytest.raises(ValueError, match=r"got 0\.5"):
        budget.expected_recv_rows(1, 1, imbalance=0.5)


def test_window_rounding_is_the_heap_s() -> None:
    assert [budget.round_window_bytes(n) for n in (0, 1, 64, 4032, 4033, 4096, 4097)] == [
        0,
        64,
        64,
        4032,
        4096,
        4096,
        8192,
    ]


def test_receive_window_has_rows_then_weights() -> None:
    assert budget.receive_window_bytes(3, 16) == 64
    assert budget.receive_window_bytes(3, 16, 4) == 128


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "depth"), [(1, 1, 2), (8, 64, 4), (24, 257, 5)]
)
def test_workspace_is_the_native_one(num_ranks: int, num_experts: int, depth: int) -> None:
    host = pytest.importorskip("moe_comm._host")
    native_bytes = host.workspace_bytes(num_ranks, num_experts, depth)
    assert budget.workspace_bytes(num_ranks, num_experts, depth) == native_bytes


def sizes() -> budget.WindowSizes:
    return budget.window_sizes(
        num_ranks=2,
        num_tokens=1024,
        num_topk=4,
        num_experts=8,
        num_local_experts=4,
        row_bytes=4096,
        weight_bytes=0,
    )


def test_training_keeps_every_layer_of_every_microbatch() -> None:
    one = sizes()
    assert (one.dispatched, one.expert_output, one.sums) == (16 * MIB, 16 * MIB, 4 * MIB)
    kept = budget.budget_bytes(one, num_ranks=2, num_moe_layers=3, num_microbatches=2)
    assert (kept.num_dispatched, kept.num_expert_outputs, kept.num_sums) == (7, 7, 7)
    # One more page for the control area.
    assert kept.rank_bytes == 7 * 36 * MIB + 2 * MIB
    assert kept.machine_bytes == 2 * kept.rank_bytes


def test_recompute_keeps_sums_only() -> None:
    recomputed = budget.budget_bytes(
        sizes(), num_ranks=2, num_moe_layers=3, num_microbatches=2, recompute=True
    )
    assert (recomputed.num_dispatched, recomputed.num_expert_outputs, recomputed.num_sums) == (
        2,
        2,
        7,
    )


def test_weights_at_the_experts_let_their_output_go() -> None:
    at_experts = budget.budget_bytes(
        sizes(), num_ranks=2, num_moe_layers=3, weights_in_combine=False
    )
    assert (at_experts.num_dispatched, at_experts.num_expert_outputs) == (4, 1)


def test_config_counts_its_busiest_rank() -> None:
    config = EpConfig(
        num_experts=4,
        num_topk=2,
        hidden=1024,
        num_max_tokens_per_rank=1024,
        dtype=torch.float32,
        expert_rank=[0, 0, 0, 1],
    )
    # Rank 0 has 3 experts: 2048 rows and 3 * 511 of padding, 4096 bytes and a weight each.
    assert (
        config.heap_bytes(
            2, num_live_windows=1, num_live_expert_outputs=0, num_live_sums=0, expert_alignment=512
        )
        == 16 * MIB
    )
    more = config.heap_bytes(2, num_live_windows=3, num_live_expert_outputs=0, num_live_sums=0)
    assert more > 3 * 8 * MIB
    worst = config.heap_bytes(
        2, num_live_windows=1, num_live_expert_outputs=0, num_live_sums=0, worst_case=True
    )
    assert worst > 2 * 1024 * 2 * 4096


def test_command_prints_what_to_reserve() -> None:
    runner = CliRunner()
    arguments = ["budget", "--ranks", "2", "--tokens", "1024", "--hidden", "2048", "--topk", "4"]
    done = runner.invoke(app, [*arguments, "--experts", "8", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document["machine_bytes"] == 2 * document["rank_bytes"]
    table = runner.invoke(app, [*arguments, "--experts", "8"])
    assert f"communicator.reserve({document['rank_bytes']})" in table.output
    odd = runner.invoke(app, ["budget", "--hidden", "7"])
    assert odd.exit_code == 1
    assert "16 bytes" in odd.output
