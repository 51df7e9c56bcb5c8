"""ExpertBalancer on ranks that are threads: what it decides, moves, refuses and reports."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from moe_comm import (
    Communicator,
    EpBuffer,
    PeerFailedError,
    Placement,
    plan_placement,
)
from moe_comm.replicas import ExpertBalancer
from moe_comm.replicas.balance_plan import PlacedLayer, plan_moves
from tests.helpers.balanced_ranks import (
    BYTES_PER_EXPERT,
    NUM_EXPERTS,
    Layer,
    check_balanced,
    skewed_pair,
    start_placement,
    train,
)
from tests.helpers.rank_threads import on_ranks
from tests.helpers.replica_ranks import rows_by_rank


def placed(loads: list[int], num_ranks: int = 2, num_bytes: int = 10) -> PlacedLayer:
    return PlacedLayer(
        placement=start_placement(num_ranks),
        bytes_per_expert=num_bytes,
        loads=torch.tensor(loads),
    )


def test_layers_with_most_to_gain_come_first() -> None:
    even, idle = [10] * NUM_EXPERTS, [0] * NUM_EXPERTS
    little = [20, 10, 10, 10, 9, 9, 9, 9]
    much = [10, 10, 10, 10, 200, 10, 10, 10]
    moves = plan_moves([placed(even), placed(little), placed(idle), placed(much), placed(much)])
    gains = [move.rows_before - move.rows_after for move in moves]
    assert [move.layer_idx for move in moves][:3] == [3, 4, 1]
    assert 2 not in {move.layer_idx for move in moves}
    assert gains == sorted(gains, reverse=True)
    first = moves[0]
    (planned,) = plan_placement(torch.tensor([much]), 2, 5, present=[start_placement(2)])
    assert first.placement == planned
    assert (first.rows_before, first.mean_rows) == (230, 135.0)
    assert first.rows_after == max(rows_by_rank(planned, [much]))
    coming = [
        {*new} - {*old, -1}
        for old, new in zip(start_placement(2).slots, planned.slots, strict=True)
    ]
    assert first.num_moves == sum(map(len, coming)) > 0
    assert first.experts == tuple(sorted(set().union(*coming)))
    assert first.moved_bytes == 10 * first.num_moves


def test_moves_that_are_not_worth_their_price_stay_out() -> None:
    much = [10, 10, 10, 10, 200, 10, 10, 10]
    assert plan_moves([placed(much)], price_per_byte=0.1)
    assert plan_moves([placed(much)], price_per_byte=100.0) == []
    assert plan_moves([placed(much, num_bytes=10_000)], price_per_byte=0.1) == []


def test_layers_of_different_shapes_are_planned_together() -> None:
    much = [10, 10, 10, 10, 200, 10, 10, 10]
    other = PlacedLayer(
        placement=Placement([[0, 1, -1, -1], [2, -1, -1, -1]], 3),
        bytes_per_expert=3,
        loads=torch.tensor([90, 3, 3]),
    )
    moves = plan_moves([placed(much), other])
    assert {move.layer_idx: move.placement.num_experts for move in moves} == {0: 8, 1: 3}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_keep_their_bits_while_experts_move(num_ranks: int) -> None:
    on_ranks(num_ranks, check_balanced)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_gives_the_weights_of_a_run_without_replicas(num_ranks: int) -> None:
    balanced = on_ranks(num_ranks, lambda comm: train(comm, 2, 24))
    plain = on_ranks(num_ranks, lambda comm: train(comm, 0, 24))
    expected = {place: row for found, _ in plain for place, row in found.items()}
    assert len(expected) == 24 * NUM_EXPERTS
    for found, num_changes in balanced:
        assert num_changes >= 2
        assert found == {place: expected[place] for place in found}
    assert sum(len(found) for found, _ in balanced) > 24 * NUM_EXPERTS


@pytest.mark.parametrize(("num_ranks", "step_bytes"), [(2, None), (4, None), (2, 16)])
def test_owners_that_stay_are_stepped_alone(num_ranks: int, step_bytes: int | None) -> None:
    balanced = on_ranks(
        num_ranks, lambda comm: train(comm, 2, 24, keeps_owners=True, step_bytes=step_bytes)
    )
    plain = on_ranks(num_ranks, lambda comm: train(comm, 0, 24))
    expected = {place: row for found, _ in plain for place, row in found.items()}
    size = NUM_EXPERTS // num_ranks
    for rank_idx, (found, num_changes) in enumerate(balanced):
        assert num_changes >= 2
        assert {(23, expert) for expert in range(rank_idx * size, (rank_idx + 1) * size)} <= {
            *found
        }
        assert found == {place: expected[place] for place in found}
    assert sum(len(found) for found, _ in balanced) > 24 * NUM_EXPERTS


def test_weights_that_move_in_parts_are_not_trained() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(
            ValueError, match=r"step_bytes = 16 .* training .*: layer 0 has no kept slots"
        ):
            train(comm, 1, 1, step_bytes=16)

    on_ranks(2, body)


def test_copies_of_replicas_are_prepared_once_per_placement_and_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights that one rank alone has put elsewhere are found there."""

    def body(comm: Communicator) -> None:
        experts = [0, 1, 2, 3, 4] if comm.rank_idx == 0 else [4, 5, 6, 7, 0]
        kept = start_placement(2).slots[comm.rank_idx][:4]
        layer = Layer.of(comm, Placement([[0, 1, 2, 3, 4], [4, 5, 6, 7, 0]], num_experts=8))
        with ExpertBalancer(comm) as balancer:
            balancer.add_layer(layer.buffer, layer.weights, num_kept_slots=4)
            prepare = balancer._copies.prefetch
            prepared = []

            def count(*args: Any, **options: Any) -> Any:
                prepared.append(args)
                return prepare(*args, **options)

            monkeypatch.setattr(balancer._copies, "prefetch", count)
            for step, num_prepared in enumerate((1, 1, 2, 2, 3), 1):
                if step == 3 and comm.rank_idx == 1:
                    for weight in layer.weights:
                        weight.data = weight.data.clone()
                if step == 5:
                    experts = [0, 1, 2, 3, 5] if comm.rank_idx == 0 else [4, 5, 6, 7, 1]
                    layer.buffer.replace_placement(
                        Placement([[0, 1, 2, 3, 5], [4, 5, 6, 7, 1]], num_experts=8)
                    )
                for weight in layer.weights:
                    for slot, expert in enumerate(kept):
                        weight[slot] = 100 * step + expert
                balancer.reduce_gradients()
                balancer.step()
                for weight in layer.weights:
                    for slot, expert in enumerate(experts):
                        assert bool((weight[slot] == 100 * step + expert).all())
                assert len(prepared) == num_prepared

    on_ranks(2, body)


def test_backends_without_a_heap_are_refused_on_every_rank() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(
            ValueError,
            match=r"backend must be 'host' to move experts: .*reference backend has no heap",
        ):
            ExpertBalancer(comm)
        comm.all_gather(b"all went on")

    on_ranks(2, body, backend="reference")


def test_slots_that_keep_their_experts_hold_all_of_them() -> None:
    def body(comm: Communicator) -> None:
        layer = Layer.of(comm, start_placement(comm.num_ranks))
        with ExpertBalancer(comm) as balancer:
            for num_kept, wrong in ((3, "expert 3 lies in 0 of them"), (6, "must be <= 5, got 6")):
                with pytest.raises(ValueError, match=wrong):
                    balancer.add_layer(layer.buffer, layer.weights, num_kept_slots=num_kept)
            with pytest.raises(TypeError, match="gradients must be callable, got"):
                balancer.add_layer(layer.buffer, layer.weights, gradients=layer.weights)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"num_kept_slots=0 on rank 0.*=4 on rank 1"):
                balancer.add_layer(layer.buffer, layer.weights, num_kept_slots=4 * comm.rank_idx)

    on_ranks(2, body)


def test_a_layer_that_some_ranks_have_switched_is_switched_on_all() -> None:
    def body(comm: Communicator) -> None:
        with ExpertBalancer(comm, layers_per_step=1) as balancer:
            moved, waiting = skewed_pair(comm, balancer)
            present = moved.buffer.config.placement
            if comm.rank_idx == 1:
                agree = balancer._copies.agree

                def hear_of_a_death(call: str, *said: Any) -> None:
                    agree(call, *said)
                    if call == "commit":
                        balancer._copies.agree = agree  # type: ignore[method-assign]
                        raise PeerFailedError("rank 7 died", ranks=(7,))

                balancer._copies.agree = hear_of_a_death  # type: ignore[method-assign]
                with pytest.raises(
                    PeerFailedError, match=r"layer \d, commit of experts \[\d.*\]: rank 7 died"
                ):
                    balancer.step()
                assert waiting.buffer.config.placement == start_placement(2)
            else:
                balancer.step()
            waiting.check_weights()
            comm.recover()
            balancer.recover()
            assert moved.buffer.config.placement == present
            assert waiting.buffer.config.placement != start_placement(2)
            for layer in (moved, waiting):
                layer.check_weights()
            said = comm.all_gather(str(waiting.buffer.config.placement).encode())
            assert said[0] == said[1]

    on_ranks(2, body)


def test_plans_are_those_of_the_price_and_the_scatter() -> None:
    def body(comm: Communicator) -> None:
        plans = []
        for price, scatter in ((0.0, 0.0), (0.2, 2.0), (0.2, 0.0), (10.0, 0.0)):
            layer = Layer.of(comm, start_placement(2))
            with ExpertBalancer(comm, price_per_byte=price, scatter=scatter) as balancer:
                balancer.add_layer(layer.buffer, layer.weights)
                layer.run(0, 0)
                loads = layer.buffer.expert_loads()
                balancer.step(rebalance=True)
            (planned,) = plan_placement(
                loads[None],
                2,
                5,
                present=[start_placement(2)],
                bytes_per_expert=BYTES_PER_EXPERT,
                price_per_byte=price,
                scatter=scatter,
            )
            assert layer.buffer.config.placement == planned
            plans.append(planned)
        assert len({*plans}) == 4
        assert plans[-1] == start_placement(2)

    on_ranks(2, body)


def test_the_window_of_loads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="moe_comm")

    def body(comm: Communicator) -> None:
        layer = Layer.of(comm, start_placement(2))
        x = torch.ones(6, 16)
        cold, hot = (torch.tensor([[expert, -1]] * 6) for expert in (0, 5))
        with ExpertBalancer(comm, num_steps=4, num_window_steps=2) as balancer:
            balancer.add_layer(layer.buffer, layer.weights)
            for topk_idx in (cold, cold, hot, hot):
                layer.buffer.dispatch(x, topk_idx)
                assert balancer.last_report is None
                balancer.step()
            report = balancer.last_report
            assert (report.step, report.is_planned, report.num_waiting) == (4, True, 0)
            (move,) = report.moves
            # 2 ranks send 2 * 6 rows; the first two steps are out of the window.
            assert (move.rows_before, move.rows_after, move.mean_rows) == (24, 12, 12.0)
            assert int(layer.buffer.expert_loads().sum()) == 0
            for step in range(5, 8):
                layer.buffer.dispatch(x, cold)
                balancer.step(rebalance=step == 7)
                assert balancer.last_report.step == (7 if step == 7 else 4)
        with pytest.raises(ValueError, match=r"call count_loads\(\) before"):
            layer.buffer.expert_loads()

    on_ranks(2, body)
    assert any("layer 0: " in text and "24 -> 12 rows" in text for text in caplog.messages)


def test_ranks_that_do_different_things_are_told_and_go_on() -> None:
    def body(comm: Communicator) -> None:
        is_odd = comm.rank_idx == 1
        with pytest.raises(ValueError, match=r"rank 1.*num_steps must be >= 1, got 0"):
            ExpertBalancer(comm, num_steps=0 if is_odd else 4)
        with pytest.raises(ValueError, match=r"different balancers.*num_steps=4.*num_steps=5"):
            ExpertBalancer(comm, num_steps=5 if is_odd else 4)
        with pytest.raises(TypeError, match=r"price_per_byte must be a number"):
            ExpertBalancer(comm, price_per_byte="1" if is_odd else 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="num_window_steps"):
            ExpertBalancer(comm, num_steps=4, num_window_steps=5)
        layer = Layer.of(comm, start_placement(2))
        with ExpertBalancer(comm, num_steps=2) as balancer:
            for weights, text in (
                ([layer.weights[0][:2]], r"rank 1: weights\[0\] must have 5 slots, got 2"),
                ([layer.weights[0].double()], r"ranks add different layers.*float32.*float64"),
                ([layer.weights[0], layer.weights[0]], "slots of weights share bytes"),
            ):
                with pytest.raises(ValueError, match=text):
                    balancer.add_layer(layer.buffer, weights if is_odd else [layer.weights[0]])
            balancer.add_layer(layer.buffer, layer.weights)
            with pytest.raises(ValueError, match="another layer already"):
                balancer.add_layer(layer.buffer, layer.weights)
            with pytest.raises(ValueError, match=r"different steps.*=False.*=True"):
                balancer.step(rebalance=is_odd)
            with pytest.raises(TypeError, match=r"rank 1.*rebalance must be a bool"):
                balancer.step(rebalance=1 if is_odd else False)  # type: ignore[arg-type]
            with Layer.of(comm, None).buffer as plain:
                with pytest.raises(ValueError, match="has no placement"):
                    balancer.add_layer(plain, layer.weights)
            layer.run(0, 0)
            if is_odd:
                layer.buffer.count_loads()  # has seen less than rank 0
            balancer.step()
            with pytest.raises(
                ValueError, match=r"different steps.*plan of 1 moves.*plan of 0 moves"
            ):
                balancer.step()
            assert layer.buffer.config.placement == start_placement(2)
            layer.check_weights()
            layer.buffer.count_loads()
            layer.run(0, 0)
            balancer.step()
            assert layer.buffer.config.placement != start_placement(2)
            layer.check_weights()
        with pytest.raises(ValueError, match="the balancer has been destroyed"):
            balancer.step()

    on_ranks(2, body)


def test_weights_in_another_place_are_moved_by_the_next_step() -> None:
    def body(comm: Communicator) -> None:
        layer = Layer.of(comm, start_placement(2))
        with ExpertBalancer(comm, num_steps=1, step_bytes=BYTES_PER_EXPERT) as balancer:
            balancer.add_layer(layer.buffer, layer.weights)
            layer.run(0, 0)
            balancer.step()
            if comm.rank_idx == 1:
                for weights in layer.weights:
                    weights.data = weights.clone()
            with pytest.raises(ValueError, match="rank 1: a slot of weights has moved"):
                while layer.buffer.config.placement == start_placement(2):
                    balancer.step()
            assert layer.buffer.config.placement == start_placement(2)
            while layer.buffer.config.placement == start_placement(2):
                balancer.step()
            layer.check_weights()

    on_ranks(2, body)


def test_a_rank_that_cannot_move_is_named_and_nothing_has_changed() -> None:
    def body(comm: Communicator) -> None:
        layer = Layer.of(comm, start_placement(2))
        with ExpertBalancer(comm, num_steps=1) as balancer:
            balancer.add_layer(layer.buffer, layer.weights)
            layer.run(0, 0)
            storage = layer.weights[0].untyped_storage()
            kept, size = storage.tolist(), len(storage)
            if comm.rank_idx == 1:
                storage.resize_(0)
            said = ""
            try:
                balancer.step()
            except ValueError as error:
                said = str(error)
            if comm.rank_idx == 1:
                storage.resize_(size)
                storage.copy_(torch.tensor(kept, dtype=torch.uint8).untyped_storage())
            assert re.match(r"layer 0, prefetch of experts \[\d.*\]: rank 1: ", said)
            assert layer.buffer.config.placement == start_placement(2)
            layer.check_weights()
            balancer.step()  # the layer still waits
            assert layer.buffer.config.placement != start_placement(2)
            layer.check_weights()

    on_ranks(2, body)


def test_a_layer_moves_in_parts_while_it_runs() -> None:
    def body(comm: Communicator) -> None:
        layer, plain = Layer.of(comm, start_placement(2)), Layer.of(comm, None)
        with ExpertBalancer(comm, num_steps=3, step_bytes=16) as balancer:
            balancer.add_layer(layer.buffer, layer.weights)
            waited = switched = 0
            for step in range(40):
                assert torch.equal(layer.run(step, 0)[0], plain.run(step, 0)[0])
                before = layer.buffer.config.placement
                balancer.step()
                report = balancer.last_report
                if report is not None and report.step == step + 1:
                    waited += report.num_waiting
                    switched += len(report.moves)
                    assert bool(report.moves) == (layer.buffer.config.placement != before)
                layer.check_weights()
            assert waited > 2 * switched >= 4

    on_ranks(2, body)


def test_layers_that_others_have_changed_are_refused() -> None:
    def body(comm: Communicator) -> None:
        layer = Layer.of(comm, start_placement(2))
        with ExpertBalancer(comm, num_steps=1, step_bytes=16) as balancer:
            balancer.add_layer(layer.buffer, layer.weights)
            layer.run(0, 0)
            balancer.step()
            assert balancer.last_report.num_waiting == 1
            other = Placement([[0, 1, 2, 3, 4], [4, 5, 6, 7, -1]], NUM_EXPERTS)
            layer.buffer.replace_placement(other)
            with pytest.raises(ValueError, match=r"layer 0, which is being moved, was \(\("):
                balancer.step()
            layer.buffer.replace_placement(start_placement(2))
            balancer.step()
            if comm.rank_idx == 1:
                layer.buffer.destroy()
            with pytest.raises(
                ValueError, match="rank 1: the buffer of layer 0 has been destroyed"
            ):
                balancer.step()

    on_ranks(2, body)


def test_buffers_of_unequal_slots_are_refused() -> None:
    def body(comm: Communicator) -> None:
        layer = Layer.of(comm, Placement([[0, 1, 2, 3], [4, 5, 6, 7, 0]], NUM_EXPERTS))
        assert isinstance(layer.buffer, EpBuffer)
        with (
            ExpertBalancer(comm) as balancer,
            pytest.raises(ValueError, match=r"same number of slots, got \[4, 5\]"),
        ):
            balancer.add_layer(layer.buffer, layer.weights)

    on_ranks(2, body)
