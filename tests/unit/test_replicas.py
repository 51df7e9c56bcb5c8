"""Dispatch and combine with replicas of experts, on ranks that are threads."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref

import pytest
import torch

from moe_comm import (
    FP8_BLOCK128,
    Capacity,
    CapacityError,
    Communicator,
    EpBuffer,
    EpConfig,
    Layout,
    _host,
)
from moe_comm.ep.backends.expert_ranks import Placement as Slots
from moe_comm.ep.backends.expert_ranks import replicas_of
from moe_comm.ep.backends.simt import SimtBackend, use_device
from moe_comm.ep.budget import round_window_bytes, token_sets_bytes
from moe_comm.ep.placement import REPLICA_RULES, Placement, ReplicaRule
from moe_comm.ep.replica_spec import choose_slots, share
from moe_comm.testing.cases import seeded
from tests.helpers.captured_graphs import Graph
from tests.helpers.described_tensors import needs_described_tensors
from tests.helpers.rank_threads import on_ranks
from tests.helpers.replica_ranks import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_MAX_TOKENS,
    NUM_TOPK,
    check_dense_by_rank,
    check_dispatch,
    check_received,
    check_reduced,
    check_same_bits,
    chosen,
    config_of,
    definition,
    inputs,
    least_largest_load,
    random_placement,
)

MANY_TOKENS = 200  # more than a word of a set has bits
BACKENDS = ["host", "simt", "reference"]


def test_native_shares_are_those_of_the_definition() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        num_ranks, num_local_ranks = rng.choice(((8, 2), (8, 8), (6, 3), (5, 1), (1, 1)))
        placement = random_placement(seed, num_ranks)
        scale = rng.choice((3, 1000))
        counts = [
            [rng.randint(0, scale) ** 2 for _ in range(NUM_EXPERTS)] for _ in range(num_ranks)
        ]
        masked = [rank for rank in range(num_ranks) if seed % 4 == 0 and rng.random() < 0.4]
        replicas = replicas_of(placement, num_local_ranks)
        assert replicas is not None
        native = Slots.of(torch.tensor(placement.slot_rank, dtype=torch.int32), num_ranks).native
        width = placement.num_slots
        asked = torch.zeros(num_ranks, width + num_ranks + 2, dtype=torch.int32)
        asked[:, :NUM_EXPERTS] = torch.tensor(counts)
        asked[0, [width + rank for rank in masked]] = -1
        found = _host.layout.share_rows(asked, replicas, native)
        expected = share(counts, placement, num_local_ranks, frozenset(masked))
        assert found[:, :width].tolist() == expected
        assert found[0, width : width + num_ranks].lt(0).nonzero().flatten().tolist() == masked


@pytest.mark.parametrize(
    ("backend", "rule", "layout"),
    [
        (backend, rule, layout)
        for backend in BACKENDS
        for rule in REPLICA_RULES
        for layout in Layout
    ],
)
def test_rows_go_to_the_replicas_of_the_rule(
    backend: str, rule: ReplicaRule, layout: Layout
) -> None:
    for seed, num_ranks in enumerate((1, 2, 3, 4)):
        on_ranks(
            num_ranks,
            lambda comm, seed=seed: check_dispatch(comm, rule, layout, seed),
            backend=backend,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_nodes_limits_masks_and_quantized_rows(backend: str) -> None:
    def body(comm: Communicator) -> None:
        drop = Capacity(num_rows=24, num_rows_per_expert=9, on_overflow="drop")
        check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, 5, capacity=drop, expert_alignment=4)
        for masked in ((1,), (0, 3)):
            check_dispatch(comm, "balanced", Layout.LOW_LATENCY, 6, masked=masked)
        check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, 7, quantization=FP8_BLOCK128)
        check_dispatch(comm, "balanced", Layout.RANK_MAJOR, 7, quantization=FP8_BLOCK128)
        grow = Capacity(num_rows=20, on_overflow="grow")
        check_dispatch(comm, "balanced", Layout.RANK_MAJOR, 9, capacity=grow, expert_alignment=4)
        check_dispatch(comm, "nearest", Layout.EXPERT_MAJOR, 8)

    on_ranks(4, body, backend=backend, num_local_ranks=2)


@pytest.mark.parametrize("rule", ["balanced", "nearest", "hash"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_and_gradients_have_the_bits_of_those_without_replicas(
    backend: str, rule: ReplicaRule
) -> None:
    on_ranks(3, lambda comm: check_same_bits(comm, rule, 3), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_by_rank_are_those_of_a_dense_layer_and_loads_the_least(backend: str) -> None:
    for seed, num_ranks in enumerate((2, 3, 4, 5, 3, 2)):
        loads = on_ranks(
            num_ranks, lambda comm, seed=seed: check_dense_by_rank(comm, seed), backend=backend
        )
        totals = chosen(inputs(seed, num_ranks)[1])
        placement = random_placement(seed, num_ranks)
        assert max(loads) == least_largest_load(totals, placement, [*range(num_ranks)])


def test_choices_that_peers_read_go_back() -> None:
    placement = random_placement(3, 3)

    def body(comm: Communicator) -> None:
        live_bytes = []
        with EpBuffer(comm, config_of(placement)) as buffer:
            for step in range(12):
                x, topk_idx, weights = inputs(step % 4, 3)
                result = buffer.dispatch(
                    *(each[comm.rank_idx] for each in (x, topk_idx, weights)),
                    layout=Layout.RANK_MAJOR,
                    async_op=step < 4,
                )
                spec = definition(placement, "balanced", topk_idx, 3, Layout.RANK_MAJOR)
                result.event.wait()
                check_received(result, spec.received(comm.rank_idx, x, weights))
                del result
                live_bytes.append(comm.heap_stats().live_bytes)
            for _ in range(buffer.config.num_max_in_flight):
                buffer.dispatch(x[comm.rank_idx], topk_idx[comm.rank_idx])
            idle_bytes = comm.heap_stats().live_bytes
        # Those of as many operations as may be in flight are kept.
        num_tokens = [len(inputs(seed, 3)[0][comm.rank_idx]) for seed in range(4)]
        num_shared = sum(len(slots) > 1 for slots in placement.slots_of_expert)
        kept = [
            round_window_bytes((3 + num_shared) * -(-number // 64) * 8) for number in num_tokens
        ]
        assert max(kept) <= token_sets_bytes(3, NUM_MAX_TOKENS, NUM_TOPK, num_shared)
        kept_bytes = sum(kept)
        assert kept_bytes > 0
        assert [each - idle_bytes for each in live_bytes[8:]] == [kept_bytes] * 4

    on_ranks(3, body)


def test_ranks_without_memory_for_choices_say_so() -> None:
    placement = random_placement(3, 2)

    def body(comm: Communicator) -> None:
        config = dataclasses.replace(config_of(placement), num_max_tokens_per_rank=None)
        with EpBuffer(comm, config) as buffer:
            num_left = (2 << 20) - comm.heap_stats().live_bytes - (64 << 10)
            held = comm.empty(num_left if comm.rank_idx else 1, dtype=torch.uint8)
            num_tokens = 1 << 17 if comm.rank_idx else 1
            x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
            topk_idx = torch.full((num_tokens, NUM_TOPK), -1)
            with pytest.raises(CapacityError, match="rank 1") as caught:
                buffer.dispatch(x, topk_idx, layout=Layout.RANK_MAJOR)
            assert caught.value.ranks == (1,)
            buffer.dispatch(x[:1], topk_idx[:1], layout=Layout.RANK_MAJOR)
            del held

    on_ranks(2, body, max_heap_bytes=2 << 20)


@pytest.mark.parametrize("backend", ["host", "simt"])
@pytest.mark.parametrize("num_local_ranks", [2, 4])
def test_tokens_that_choose_an_expert_several_times_are_bound_once(
    backend: str, num_local_ranks: int
) -> None:
    placement = random_placement(3, 4)

    def body(comm: Communicator) -> None:
        generator = seeded("repeated choices", 0)
        config = dataclasses.replace(
            config_of(placement), num_topk=5, num_max_tokens_per_rank=MANY_TOKENS
        )
        with EpBuffer(comm, config) as buffer:
            for num_drawn in (1, 2, NUM_EXPERTS):
                numbers = (MANY_TOKENS, 64, 0, 7)
                drawn = [torch.rand(number, 5, generator=generator) for number in numbers]
                topk_idx = [(each**3 * (num_drawn + 1)).to(torch.int64) - 1 for each in drawn]
                x = [torch.rand(number, HIDDEN, generator=generator) for number in numbers]
                x = [rows.to(torch.bfloat16) for rows in x]
                result = buffer.dispatch(
                    x[comm.rank_idx], topk_idx[comm.rank_idx], layout=Layout.RANK_MAJOR
                )
                spec = definition(
                    placement, "balanced", topk_idx, num_local_ranks, Layout.RANK_MAJOR
                )
                check_received(result, spec.received(comm.rank_idx, x))

    on_ranks(4, body, backend=backend, num_local_ranks=num_local_ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_added_on_their_rank(backend: str) -> None:
    on_ranks(4, lambda comm: check_reduced(comm, 9, "rank_reduction"), backend=backend)


@pytest.mark.parametrize("backend", ["host", "simt"])
def test_a_placement_is_replaced_and_handles_stay_what_they_are(backend: str) -> None:
    placements = [
        Placement([[0, 1, 2, 3], [4, 5, 0, -1]], NUM_EXPERTS),
        Placement([[5, 4, 0, -1], [0, 1, 2, 3]], NUM_EXPERTS),
        Placement([[5, 4, 0, -1], [-1, 1, 2, 3]], NUM_EXPERTS),
    ]

    def body(comm: Communicator) -> None:
        rank_idx = comm.rank_idx
        x, topk_idx, weights = inputs(3, 2)
        with EpBuffer(comm, config_of(placements[0])) as buffer:
            results = []
            for placement in placements:
                if placement is not placements[0]:
                    buffer.replace_placement(placement)
                assert buffer.config.placement == placement
                result = buffer.dispatch(x[rank_idx], topk_idx[rank_idx], weights[rank_idx])
                spec = definition(placement, "balanced", topk_idx, 2, Layout.EXPERT_MAJOR)
                check_received(result, spec.received(rank_idx, x, weights))
                results.append((result, spec))
            for result, spec in results:
                received = [spec.received(peer, x).x for peer in range(2)]
                found = buffer.combine(result.x.clone(), result.handle)
                assert torch.equal(found, spec.sums(rank_idx, received))

    on_ranks(2, body, backend=backend)


@pytest.mark.parametrize("layout", list(Layout))
def test_rows_of_replicas_on_several_devices(layout: Layout) -> None:
    def body(comm: Communicator) -> None:
        with use_device(comm.rank_idx % 2):
            check_dispatch(comm, "balanced", layout, 4)

    on_ranks(4, body, backend="simt")


@pytest.mark.parametrize("layout", list(Layout))
def test_replays_of_graphs_keep_the_placement_they_were_captured_with(layout: Layout) -> None:
    placements = [
        Placement([[0, 1, 2, 3], [4, 5, 0, -1]], NUM_EXPERTS),
        Placement([[5, 4, 0, 3], [0, 1, 2, 3]], NUM_EXPERTS),
    ]
    num_rows = 2 * NUM_MAX_TOKENS * NUM_TOPK
    by_rank = layout is Layout.RANK_MAJOR
    capacity = Capacity(num_rows=num_rows, on_overflow="raise" if by_rank else "drop")
    limit = None if layout is Layout.LOW_LATENCY else capacity

    def body(comm: Communicator) -> None:
        rank_idx = comm.rank_idx
        num_tokens = inputs(0, 2)[0][rank_idx].shape[0]
        x = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
        topk_idx = torch.empty(num_tokens, NUM_TOPK, dtype=torch.int64)
        with EpBuffer(comm, config_of(placements[0])) as buffer:
            with Graph(buffer) as graph:
                captured = buffer.dispatch(x, topk_idx, layout=layout, capacity=limit)
                sums = buffer.combine(captured.x, captured.handle)
            for seed in (0, 4, 8):
                x_of, topk_of, _ = inputs(seed, 2)
                x.copy_(x_of[rank_idx])
                topk_idx.copy_(topk_of[rank_idx])
                graph.replay()
                spec = definition(placements[0], "balanced", topk_of, 2, layout, capacity=limit)
                received = [spec.received(peer, x_of) for peer in range(2)]
                own = received[rank_idx]
                assert captured.status.tolist() == [0, 0]
                assert captured.num_tokens_per_expert.tolist() == own.num_tokens_per_expert.tolist()
                rows = slice(None) if own.is_defined is None else own.is_defined
                assert torch.equal(captured.x[rows], own.x[rows])
                assert torch.equal(sums, spec.sums(rank_idx, [each.x for each in received]))
                if seed == 0:
                    buffer.replace_placement(placements[1])
                spec = definition(placements[1], "balanced", topk_of, 2, layout)
                check_received(
                    buffer.dispatch(x, topk_idx, layout=layout), spec.received(rank_idx, x_of)
                )

    on_ranks(2, body, backend="simt")


def test_a_placement_that_does_not_fit_is_refused_on_every_rank() -> None:
    placement = Placement([[0, 1, 2, 3], [4, 5, 0, -1]], NUM_EXPERTS)
    moved = Placement([[0, 1, 2, 3], [4, 5, 1, -1]], NUM_EXPERTS)

    def body(comm: Communicator) -> None:
        with EpBuffer(comm, config_of(placement)) as buffer:
            with pytest.raises(
                ValueError, match=r"rank 1.*must have \[4, 4\] slots a rank, got \[4, 3\]"
            ):
                buffer.replace_placement(
                    Placement([[0, 1, 2, 3], [4, 5, 0]], NUM_EXPERTS) if comm.rank_idx else moved
                )
            with pytest.raises(ValueError, match="ranks have different placements"):
                buffer.replace_placement(placement if comm.rank_idx else moved)
            with pytest.raises(TypeError, match="placement must be a Placement"):
                buffer.replace_placement(None)  # type: ignore[arg-type]
            assert buffer.config.placement == placement
            x, topk_idx, _ = inputs(3, 2)
            result = buffer.dispatch(x[comm.rank_idx], topk_idx[comm.rank_idx])
            spec = definition(placement, "balanced", topk_idx, 2, Layout.EXPERT_MAJOR)
            check_received(result, spec.received(comm.rank_idx, x))
        with (
            EpBuffer(comm, config_of(None)) as buffer,
            pytest.raises(ValueError, match="made without a placement"),
        ):
            buffer.replace_placement(placement)

    on_ranks(2, body)


@pytest.mark.parametrize("backend", ["host", "simt"])
def test_bad_choices_and_configurations_are_refused_on_every_rank(backend: str) -> None:
    placement = random_placement(1, 2)
    other = random_placement(2, 2)
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)

    def body(comm: Communicator) -> None:
        with EpBuffer(comm, config_of(None)) as buffer:  # which lets the options pass from then on
            buffer.dispatch(x, torch.tensor([[0, 1, -1]]), layout=Layout.RANK_MAJOR)
        for rule, bad_id, text in (
            (
                "balanced",
                NUM_EXPERTS,
                r"rank 1.*topk_idx\[0, 1\] = 6 is not an expert id in \[-1, 6\)",
            ),
            (
                "nearest",
                NUM_EXPERTS,
                r"rank 1.*topk_idx\[0, 1\] = 6 is not an expert id in \[-1, 6\)",
            ),
            ("hash", -2, r"rank 1.*topk_idx\[0, 1\] = -2 is not an expert id in \[-1, 6\)"),
            (
                "given",
                placement.num_slots - 1,
                rf"rank 1.*topk_idx\[0, 1\] = {placement.num_slots - 1} is not a slot that holds",
            ),
        ):
            with EpBuffer(comm, config_of(placement, rule)) as buffer:
                with pytest.raises(ValueError, match=text):
                    buffer.dispatch(x, torch.tensor([[0, bad_id if comm.rank_idx else 1, -1]]))
                buffer.dispatch(x, torch.tensor([[0, 1, -1]]))
        for mine, theirs in (
            (config_of(placement), config_of(other)),
            (config_of(placement), config_of(placement, "hash")),
            (config_of(placement), config_of(random_placement(1, 3))),
        ):
            with pytest.raises(ValueError, match=r"placement|replica_rule"):
                EpBuffer(comm, mine if comm.rank_idx else theirs)

    on_ranks(2, body, backend=backend)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_slots_that_a_graph_may_read_are_kept(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    placements = Placement([[0, 1], [2, 0]], 3), Placement([[1, 0], [2, 1]], 3)
    config = EpConfig(
        num_experts=3, num_topk=1, hidden=HIDDEN, placement=placements[0], replica_rule="hash"
    )

    def body(comm: Communicator) -> None:
        with monkeypatch.context() as patch, EpBuffer(comm, config) as buffer:
            patch.setattr(comm, "device", torch.device(device))
            former = weakref.ref(buffer._slot_table)
            buffer.switch_placement(placements[1])
            gc.collect()
            assert (former() is None) == (device == "cpu")

    on_ranks(2, body)


_IN_ORDER = [[0, 1, 2], [3, 4, 5]]
_REPLICATED = [[0, 1, 2, 5], [3, 4, 5, 0]]


@needs_described_tensors
@pytest.mark.parametrize(
    ("backend", "rule", "slots", "is_seen"),
    [
        ("host", "balanced", _REPLICATED, True),
        ("host", "balanced", [[0, 1, 2, -1], [3, 4, 5, 0]], True),
        *(("host", rule, _IN_ORDER, True) for rule in REPLICA_RULES),
        ("simt", "balanced", _REPLICATED, True),
        *((backend, "given", _REPLICATED, True) for backend in ("host", "simt")),
        ("simt", "nearest", _IN_ORDER, True),
        ("host", "given", [[0, 1, 2], [3, 4, 5, -1]], False),
        ("host", "balanced", [[0, 1, 2], [3, 5, 4]], False),
        ("host", "nearest", _REPLICATED, False),
        ("simt", "hash", _REPLICATED, False),
    ],
)
def test_a_glance_suffices_where_ids_are_slots_or_counts_decide(
    backend: str, rule: ReplicaRule, slots: list[list[int]], is_seen: bool
) -> None:
    placement = Placement(slots, NUM_EXPERTS)
    num_ids = placement.num_slots if rule == "given" else NUM_EXPERTS

    def body(comm: Communicator) -> None:
        x, topk_idx, weights = inputs(3, 2)
        if rule == "given":
            topk_idx = choose_slots(topk_idx, placement, "hash", 2)
        # Slots as maps list them: ascending, then -1.
        topk_idx = [(each % (num_ids + 1)).sort(1).values for each in topk_idx]
        topk_idx = [each.masked_fill(each == num_ids, -1) for each in topk_idx]
        mine = topk_idx[comm.rank_idx]
        routing_map = torch.zeros(len(mine), num_ids + 1, dtype=torch.bool)
        routing_map = routing_map.scatter_(1, mine + 1, True)[:, 1:].contiguous()
        for layout in Layout:
            spec = definition(placement, rule, topk_idx, 2, layout)
            expected = spec.received(comm.rank_idx, x, weights)
            unweighted = spec.received(comm.rank_idx, x)
            with EpBuffer(comm, config_of(placement, rule)) as buffer:
                by_rules = buffer._dispatch_by_rules
                buffer.dispatch(x[comm.rank_idx], mine, layout=layout)  # its options pass
                num_checked = 0

                def counted(*arguments: object, by_rules: object = by_rules) -> object:
                    nonlocal num_checked
                    num_checked += 1
                    return by_rules(*arguments)  # type: ignore[operator]

                buffer._dispatch_by_rules = counted  # type: ignore[assignment, method-assign]
                result = buffer.dispatch(
                    x[comm.rank_idx], mine, weights[comm.rank_idx], layout=layout
                )
                check_received(result, expected)
                assert num_checked == (not is_seen)
                if backend == "host":
                    result = buffer.dispatch(x[comm.rank_idx], routing_map, layout=layout)
                    check_received(result, unweighted)
                    assert num_checked == 2 * (not is_seen)
                bad_id = mine.new_full((1, NUM_TOPK), -1)
                bad_id[0, 1] = num_ids if comm.rank_idx else 1
                text = rf"rank 1.*topk_idx\[0, 1\] = {num_ids} is not .* in \[-1, {num_ids}\)"
                with pytest.raises(ValueError, match=text):
                    buffer.dispatch(
                        torch.zeros(1, HIDDEN, dtype=torch.bfloat16), bad_id, layout=layout
                    )

    on_ranks(2, body, backend=backend)


def test_a_backend_that_cannot_balance_says_so_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimtBackend, "has_balanced_replicas", False)

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="the simt backend does not balance replicas"):
            EpBuffer(comm, config_of(random_placement(1, 2)))
        for rule in ("nearest", "hash", "given"):
            for layout in Layout:
                check_dispatch(comm, rule, layout, 3)
        check_same_bits(comm, "nearest", 3)

    on_ranks(2, body, backend="simt")


def test_what_a_configuration_must_keep() -> None:
    placement = random_placement(1, 2)
    with pytest.raises(ValueError, match="placement must have num_experts = 5, got 6"):
        EpConfig(num_experts=5, num_topk=1, hidden=8, placement=placement)
    with pytest.raises(ValueError, match="by expert_rank or by placement, got both"):
        dataclasses.replace(config_of(placement), expert_rank=[0] * NUM_EXPERTS)
    with pytest.raises(ValueError, match=r"replica_rule must be one of .*, got 'even'"):
        dataclasses.replace(config_of(placement), replica_rule="even")
    with pytest.raises(ValueError, match="replica_rule needs a placement, got 'hash' and None"):
        EpConfig(num_experts=5, num_topk=1, hidden=8, replica_rule="hash")
    with_slots, without = (
        dataclasses.replace(config_of(each), num_max_tokens_per_rank=4096).heap_bytes(
            2, layout=Layout.LOW_LATENCY
        )
        for each in (placement, None)
    )
    assert with_slots > 1.5 * without  # 6 slots of the rank that has most, where 3 experts were


def test_a_routing_map_has_the_columns_of_its_ids() -> None:
    placement = random_placement(3, 2)

    def body(comm: Communicator) -> None:
        x, topk_idx, _ = inputs(3, 2)
        slots = choose_slots(topk_idx, placement, "hash", 2)
        for rule, ids, num_ids in (
            ("balanced", topk_idx, NUM_EXPERTS),
            ("given", slots, placement.num_slots),
        ):
            # A map lists experts in ascending order.
            ids = [each.sort(1).values for each in ids]
            spec = definition(placement, rule, ids, 2, Layout.EXPERT_MAJOR)
            mine = ids[comm.rank_idx]
            routing_map = torch.zeros(len(mine), num_ids + 1, dtype=torch.bool)
            routing_map.scatter_(1, mine + 1, True)
            with EpBuffer(comm, config_of(placement, rule)) as buffer:
                result = buffer.dispatch(x[comm.rank_idx], routing_map[:, 1:].contiguous())
                check_received(result, spec.received(comm.rank_idx, x))

    on_ranks(2, body)
