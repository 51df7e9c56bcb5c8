from __future__ import annotations

import dataclasses

import pytest

from moe_comm.cli.bench.result import to_json
from moe_comm.cli.command_rules import wide_console

pytest.importorskip("megatron.core")

from benchmarks import clients, megatron_flex

CASE = dataclasses.replace(
    megatron_flex.FRAMEWORK.case,
    num_ranks=2,
    num_tokens=24,
    hidden=64,
    num_experts=8,
    num_topk=2,
    num_repeats=2,
)


@pytest.mark.full
def test_every_client_is_checked_and_timed_in_the_form_of_the_other_benchmarks() -> None:
    rows = clients.bench(megatron_flex.FRAMEWORK, CASE)
    phases = (*megatron_flex.PHASES, "forward", "step")
    names = (megatron_flex.ORACLE, *CASE.clients)
    document = to_json({}, rows, {})
    found = {(row["client"], row["op"]): row for row in document["cases"]}
    assert set(found) == {(client, f"megatron_{phase}") for client in names for phase in phases}
    for (client, _), row in found.items():
        assert (row["ranks"], row["tokens"], row["topk"], row["check"]) == (2, 24, 2, "ok")
        assert row["p50_us"] > 0.0
        is_oracle = client == megatron_flex.ORACLE
        assert set(row["speedup"]) == (set() if is_oracle else {megatron_flex.ORACLE})
    console = wide_console()
    with console.capture() as capture:
        console.print(clients.result_table(megatron_flex.FRAMEWORK, CASE, rows))
    assert "flex_manager" in capture.get()


def test_a_step_is_its_phases() -> None:
    phases = {"dispatch": 1.0, "combine": 2.0, "combine_backward": 4.0, "dispatch_backward": 8.0}
    assert megatron_flex._with_sums(phases) == phases | {"forward": 3.0, "step": 15.0}
    slow = [phases | {"dispatch": 6.0}, phases | {"dispatch": 3.0}, phases | {"dispatch": 4.0}]
    one = dataclasses.replace(CASE, clients=("flex_manager",))
    row = clients.result_row(
        megatron_flex.FRAMEWORK, one, "flex_manager", "dispatch", "host", [phases] * 3, slow
    )
    assert row.speedup == {megatron_flex.ORACLE: 4.0}
    assert (row.p50_us, row.peer_p50_us) == (1.0, {megatron_flex.ORACLE: 4.0})
