"""Routes, chunks and buckets between meshes, without processes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from moe_comm.errors import PeerTimeoutError
from moe_comm.resharding import ir
from moe_comm.resharding.ir import units
from moe_comm.resharding.ir.transfer import TransferType
from tests.helpers.thread_transport import Group, ThreadTransport, use_thread_transport


def mesh_of(ranks: list[Any] | range) -> SimpleNamespace:
    return SimpleNamespace(mesh=torch.tensor(list(ranks)))


def routes_of(
    source: list[Any] | range,
    source_placements: list[Placement],
    target: list[Any] | range,
    target_placements: list[Placement],
    shape: tuple[int, ...] | None = None,
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(source rank, its cell, destination ranks)."""
    m2m = ir.get_m2m_map(
        mesh_of(source),
        source_placements,
        mesh_of(target),
        target_placements,
        None,
        global_shape=shape,
    )
    return [
        (route.src.rank, route.src.cell, tuple(end.rank for end in route.dsts))
        for route in m2m.routes
    ]


# ---------------------------------------------------------------------------------------------
# Routes.


def test_an_even_map_is_that_of_least_common_multiples() -> None:
    m2m = ir.get_m2m_map(mesh_of(range(2)), [Shard(0)], mesh_of([2, 3, 4]), [Shard(0)], None)
    routes, source_num_slicers, target_num_slicers, reductions = m2m
    assert (source_num_slicers, target_num_slicers, reductions) == ([3], [2], [])
    assert routes == m2m.routes
    assert [(r.src.rank, r.src.cell, r.dsts[0].rank, r.dsts[0].cell) for r in m2m.routes] == [
        (0, (0,), 2, (0,)),
        (0, (1,), 2, (1,)),
        (0, (2,), 3, (0,)),
        (1, (0,), 3, (1,)),
        (1, (1,), 4, (0,)),
        (1, (2,), 4, (1,)),
    ]
    assert {route.kind for route in m2m.routes} == {TransferType.P2P}


def test_a_shape_gives_fewer_and_uneven_cells() -> None:
    m2m = ir.get_m2m_map(
        mesh_of(range(2)), [Shard(0)], mesh_of([2, 3, 4]), [Shard(0)], None, global_shape=(7, 2)
    )
    # Sources hold 0..3 and 4..6, targets 0..2, 3..5 and 6.
    cells = [
        (r.src.rank, m2m.source.slices(r.src)[0], r.dsts[0].rank, m2m.target.slices(r.dsts[0])[0])
        for r in m2m.routes
    ]
    assert cells == [
        (0, slice(0, 3), 2, slice(0, 3)),
        (0, slice(3, 4), 3, slice(0, 1)),
        (1, slice(0, 2), 3, slice(1, 3)),
        (1, slice(2, 3), 4, slice(0, 1)),
    ]
    assert m2m.source.shapes == {0: (4, 2), 1: (3, 2)}


def test_rank_numbers_are_exact() -> None:
    first = 18_003_312
    routes = routes_of([first, first + 1], [Shard(0)], [2**40, 2**40 + 1], [Shard(1)], (2, 2))
    assert [(src, dsts) for src, _, dsts in routes] == [
        (first, (2**40,)),
        (first, (2**40 + 1,)),
        (first + 1, (2**40,)),
        (first + 1, (2**40 + 1,)),
    ]


def test_replicas_take_turns() -> None:
    routes = routes_of(range(3), [Replicate()], range(10, 16), [Shard(0)], (12,))
    assert [(src, dsts) for src, _, dsts in routes] == [(i % 3, (10 + i,)) for i in range(6)]
    everywhere = routes_of(range(2), [Replicate()], range(10, 14), [Replicate()], (12,))
    assert everywhere == [(0, (0,), (10, 12)), (1, (0,), (11, 13))]


def test_what_a_rank_holds_it_copies() -> None:
    assert routes_of(range(4), [Replicate()], range(4), [Shard(0)], (8,)) == [
        (rank, (rank,), (rank,)) for rank in range(4)
    ]
    assert routes_of(range(2), [Replicate()], range(3), [Replicate()], (8,)) == [
        (0, (0,), (0, 2)),
        (1, (0,), (1,)),
    ]


def test_whoever_shares_a_reduction_with_a_sender_only_reduces() -> None:
    mesh = [[0, 1], [2, 3]]
    # Ranks 0 and 1 are one reduction, 2 and 3 the other; one target needs only one of them.
    assert routes_of(mesh, [Replicate(), Partial()], [4], [Replicate()], (4,)) == [
        (0, (0,), (4,)),
        (1, (0,), ()),
    ]
    # Over both mesh dimensions all four are linked.
    routes = routes_of(mesh, [Partial(), Partial()], [4], [Replicate()], (4,))
    assert [dsts for _, _, dsts in routes] == [(4,), (), (), ()]
    m2m = ir.get_m2m_map(
        mesh_of(mesh), [Shard(0), Partial("max")], mesh_of([4]), [Replicate()], None
    )
    assert m2m.source_partial_reductions == [(1, "max")]


def test_a_map_is_data() -> None:
    m2m = ir.get_m2m_map(mesh_of(range(2)), [Partial()], mesh_of([1, 2]), [Shard(1)], None)
    assert pickle.loads(pickle.dumps(m2m)) == m2m


class _NormPartial(Partial):
    """A pending reduction that is no plain sum."""


@pytest.mark.parametrize(
    ("source", "target", "shape", "error", "text"),
    [
        ([Shard(0)], [Partial()], None, NotImplementedError, r"target_placements.*Partial"),
        ([_NormPartial()], [Shard(0)], None, NotImplementedError, "source_placements"),
        ([Partial("xor")], [Shard(0)], None, NotImplementedError, "xor"),
        ([Shard(0), Shard(1)], [Shard(0)], None, ValueError, r"source_placements.*\(2,\)"),
        ([Shard(2)], [Shard(0)], (4, 4), ValueError, r"Shard\(dim=2\).*\(4, 4\)"),
        ([Shard(-1)], [Shard(0)], None, ValueError, r"Shard\(dim=-1\)"),
    ],
)
def test_placements_that_cannot_be_moved_are_named(
    source: list[Placement],
    target: list[Placement],
    shape: tuple[int, ...] | None,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        routes_of(range(2), source, range(2), target, shape)


def test_meshes_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match=r"target_mesh names a rank twice: \[1, 1\]"):
        routes_of([0], [Replicate()], [1, 1], [Replicate()])
    with pytest.raises(ValueError, match="source_mesh has no ranks"):
        routes_of([], [Replicate()], [1], [Replicate()])


# ---------------------------------------------------------------------------------------------
# Chunks and buckets.


def chunk_of(tensor: torch.Tensor, **fields: Any) -> ir.Chunk:
    values: dict[str, Any] = {
        "transfer_type": TransferType.P2P,
        "is_source": True,
        "src_rank": 0,
        "dst_ranks": (1,),
        "chunk_shape": tuple(tensor.shape),
        "tensor": tensor,
        "slice_tuples": tuple(slice(0, size) for size in tensor.shape),
        "src_idx": (0,) * tensor.dim(),
    }
    return ir.Chunk(**(values | fields))


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        ir.Chunk(TransferType.P2P, True, 0, (1,))  # type: ignore[misc]
    fields = [field.name for field in dataclasses.fields(ir.Chunk)]
    documented = "transfer_type is_source src_rank dst_ranks buffer work chunk_shape tensor"
    documented += " slice_tuples transfer_dtype src_idx dst_idx src_slice_tuples"
    assert set(documented.split()) | {"source_partial_groups"} <= set(fields)
    assert chunk_of(torch.zeros(2, dtype=torch.bfloat16)).transfer_dtype is torch.bfloat16
    assert issubclass(ir.Bucket, ir.Transferable)
    assert issubclass(ir.Chunk, ir.Transferable)


def test_bucket_keys_tell_cells_apart_that_are_only_reduced() -> None:
    tensor = torch.zeros(2)
    groups: Any = [(Group((0, 1)), "sum")]
    sig = ((id(groups[0][0]), "sum"),)
    assert chunk_of(tensor).bucket_key == (0, (1,), (), ())
    assert chunk_of(tensor, source_partial_groups=groups).bucket_key == (0, (1,), sig, ())
    shadow = {"transfer_type": TransferType.SHADOW, "dst_ranks": (), "src_idx": (3,)}
    assert chunk_of(tensor, source_partial_groups=groups, **shadow).bucket_key == (
        0,
        (),
        sig,
        (3,),
    )
    assert chunk_of(tensor, **shadow).bucket_key == (0, (), (), ())


def test_buckets_of_mixed_dtypes_are_aligned() -> None:
    tensors = [
        torch.arange(3, dtype=torch.bfloat16),
        torch.arange(5, dtype=torch.float64),
        torch.arange(1, dtype=torch.uint8),
        torch.tensor(2.5),
    ]
    sends = ir.chunk_to_bucket_ops([chunk_of(tensor) for tensor in tensors], 1 << 20)
    landed = [torch.full_like(tensor, 77) for tensor in tensors]
    recvs = ir.chunk_to_bucket_ops([chunk_of(t, is_source=False) for t in landed], 1 << 20)
    assert len(sends) == len(recvs) == 1
    assert [(e.offset, e.nbytes) for e in sends[0].entries] == [(0, 6), (16, 40), (64, 1), (80, 4)]
    assert sends[0].total_bytes == recvs[0].total_bytes == 84
    sends[0].prepare()
    recvs[0].prepare()
    assert sends[0].buffer is not None
    recvs[0].buffer.copy_(sends[0].buffer)
    recvs[0].finalize()
    assert all(map(torch.equal, landed, tensors))
    assert recvs[0].buffer is None


def test_buckets_close_when_they_are_full() -> None:
    small, large = torch.zeros(16, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    chunks = [chunk_of(t) for t in (small, large, small, small, small)]
    chunks.insert(1, chunk_of(small, dst_ranks=(2,)))
    buckets = ir.chunk_to_bucket_ops(chunks, 48)
    sizes = [[entry.nbytes for entry in bucket.entries] for bucket in buckets]
    # In the order of first chunks: one of three small ones, that to rank 2, the large one, the rest.
    assert sizes == [[16, 16, 16], [16], [64], [16]]
    assert [bucket.dst_ranks for bucket in buckets] == [(1,), (2,), (1,), (1,)]
    with pytest.raises(ValueError, match="bucket_size must be >= 1, got 0"):
        ir.chunk_to_bucket_ops(chunks, 0)


def test_partial_chunks_have_buckets_of_their_own() -> None:
    tensor = torch.zeros(2)
    groups: Any = [(Group((0, 1)), "sum")]
    sends = [chunk_of(tensor, source_partial_groups=groups) for _ in range(3)]
    recvs = [chunk_of(tensor, is_source=False, no_coalesce=True) for _ in range(3)]
    assert [len(ir.chunk_to_bucket_ops(chunks, 1 << 20)) for chunks in (sends, recvs)] == [3, 3]


def test_a_single_cell_is_received_in_the_size_that_travels() -> None:
    target = torch.zeros(8, 4)
    chunk = chunk_of(
        target,
        is_source=False,
        chunk_shape=(2, 4),
        slice_tuples=(slice(2, 4), slice(0, 4)),
        transfer_dtype=torch.bfloat16,
    )
    (bucket,) = ir.chunk_to_bucket_ops([chunk], 1 << 20)
    bucket.prepare()
    assert bucket.buffer.numel() == bucket.total_bytes == 16
    bucket.buffer.view(torch.bfloat16).copy_(torch.arange(8))
    bucket.finalize()
    assert torch.equal(target[2:4], torch.arange(8.0).view(2, 4))
    assert target.sum() == 28


def test_contiguous_cells_travel_without_a_copy() -> None:
    tensor = torch.arange(8.0)
    chunk = {"chunk_shape": (4,), "slice_tuples": (slice(4, 8),)}
    for is_source in (True, False):
        (bucket,) = ir.chunk_to_bucket_ops([chunk_of(tensor, is_source=is_source, **chunk)], 1)
        bucket.prepare()
        assert bucket.buffer.data_ptr() == tensor[4:].data_ptr()


@pytest.mark.parametrize("is_source", [True, False])
def test_a_single_element_of_any_stride_travels(is_source: bool) -> None:
    tensor = torch.arange(8, dtype=torch.bfloat16).view(2, 4)
    cell: dict[str, Any] = {"chunk_shape": (1, 1), "slice_tuples": (slice(1, 2), slice(2, 3))}
    (bucket,) = ir.chunk_to_bucket_ops([chunk_of(tensor.T.T, is_source=is_source, **cell)], 1)
    strided = chunk_of(tensor.T, **cell, is_source=is_source, transfer_type=TransferType.P2P)
    strided.slice_tuples = (slice(2, 3), slice(1, 2))
    (other,) = ir.chunk_to_bucket_ops([strided], 1)
    for made in (bucket, other):
        made.prepare()
        assert made.buffer.view(torch.bfloat16).item() == 6


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_partial_is_reduced_in_its_own_dtype_on_a_copy(
    monkeypatch: pytest.MonkeyPatch, offset: int, is_contiguous: bool
) -> None:
    seen: list[torch.dtype] = []

    def reduce(buffer: torch.Tensor, op: str, group: object) -> None:
        seen.append(buffer.dtype)
        assert buffer.is_contiguous()
        buffer.add_(1 / 256)

    monkeypatch.setattr(units, "reduce_in_place", reduce)
    base = torch.ones(8, 4)
    source = base if is_contiguous else base.T
    cell = tuple(source[offset:].shape)
    chunk = chunk_of(
        source,
        chunk_shape=cell,
        slice_tuples=(slice(offset, source.shape[0]), slice(0, source.shape[1])),
        transfer_dtype=torch.bfloat16,
        source_partial_groups=[(Group((0, 1)), "sum"), (Group((0, 2)), "sum")],
    )
    chunk.prepare()
    assert seen == [torch.float32, torch.float32]
    # 1 + 2/256 is a bfloat16; adding twice 1/256 in bfloat16 would give 1.
    assert chunk.buffer.dtype is torch.bfloat16
    assert (chunk.buffer.float() == 1 + 2 / 256).all()
    assert (base == 1).all()


def test_a_copy_within_a_rank_is_rounded_as_what_travels() -> None:
    source, target = torch.full((2,), 1 + 2**-20), torch.zeros(2)
    chunk = chunk_of(
        target,
        transfer_type=TransferType.SELF_COPY,
        source_tensor=source,
        src_slice_tuples=(slice(0, 2),),
        transfer_dtype=torch.bfloat16,
    )
    chunk.prepare()
    assert chunk.execute() is None
    assert (target == 0).all()
    chunk.finalize()
    assert (target == 1).all()


def test_misuse_is_named() -> None:
    chunk = chunk_of(torch.zeros(2), is_source=False)
    with pytest.raises(RuntimeError, match="before it was prepared"):
        chunk.execute()
    with pytest.raises(RuntimeError, match="before it was prepared"):
        chunk.finalize()
    with pytest.raises(ValueError, match=r"\(3,\), got \(2,\)"):
        chunk_of(torch.zeros(2), chunk_shape=(3,)).prepare()
    with pytest.raises(ValueError, match="no tensor"):
        dataclasses.replace(chunk, tensor=None).prepare()
    devices = [chunk_of(torch.zeros(2)), chunk_of(torch.zeros(2, device="meta"))]
    with pytest.raises(ValueError, match=r"rank 0 to ranks \(1,\).*'cpu', 'meta'"):
        ir.chunk_to_bucket_ops(devices, 100)


def test_tensors_that_do_not_fit_the_map_are_named() -> None:
    source, target = mesh_of(range(2)), mesh_of([2, 3, 4])
    even = ir.get_m2m_map(source, [Shard(0)], target, [Shard(0)], None)
    with pytest.raises(ValueError, match=r"source_tensor of rank 0 has shape \(4, 2\).* 3 cells"):
        ir.m2m_to_chunks(even, 0, source_tensor=torch.zeros(4, 2))
    with pytest.raises(ValueError, match="rank 3 is in the mesh of target_tensor"):
        ir.m2m_to_chunks(even, 3, source_tensor=torch.zeros(6))
    shaped = ir.get_m2m_map(source, [Shard(0)], target, [Shard(0)], None, global_shape=(7,))
    with pytest.raises(ValueError, match=r"target_tensor of rank 4 .* \(1,\), got \(3,\)"):
        ir.m2m_to_chunks(shaped, 4, target_tensor=torch.zeros(3))
    assert ir.m2m_to_chunks(shaped, 7, torch.zeros(1), torch.zeros(2)) == []
    partial = ir.get_m2m_map(source, [Partial("avg")], target, [Shard(0)], None)
    with pytest.raises(ValueError, match=r"\['avg'\] of the map, got \['sum'\]"):
        ir.m2m_to_chunks(partial, 0, torch.zeros(3), source_partial_groups=[(Group((0, 1)), "sum")])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="source_partial_groups must be given, got None"):
        ir.m2m_to_chunks(partial, 0, torch.zeros(3))
    groups: Any = [(Group((0, 1)), "avg")]
    with pytest.raises(
        ValueError, match=r'source_tensor of rank 0: a pending "avg" of torch.int64'
    ):
        ir.m2m_to_chunks(
            partial, 0, torch.zeros(3, dtype=torch.int64), source_partial_groups=groups
        )


def test_values_that_need_scale_factors_are_not_converted() -> None:
    m2m = ir.get_m2m_map(mesh_of([0]), [Replicate()], mesh_of([0]), [Replicate()], None)
    e4m3, e8m0 = (torch.zeros(3, dtype=d) for d in (torch.float8_e4m3fn, torch.float8_e8m0fnu))
    assert len(ir.m2m_to_chunks(m2m, 0, e4m3, e4m3.clone())) == 1
    for side, tensors in (("target", (e4m3, torch.zeros(3))), ("source", (torch.zeros(3), e8m0))):
        with pytest.raises(ValueError, match=rf"{side}_tensor of rank 0 is .* scale factors"):
            ir.m2m_to_chunks(m2m, 0, *tensors)
    with pytest.raises(ValueError, match=r"source_tensor of rank 0 is torch.float32.*float8_e4m3"):
        ir.m2m_to_chunks(m2m, 0, torch.zeros(3), e4m3, transfer_dtype=torch.float8_e4m3fn)


def test_the_smaller_dtype_travels() -> None:
    assert ir.choose_transfer_dtype(torch.bfloat16, torch.float32) is torch.bfloat16
    assert ir.choose_transfer_dtype(torch.float32, torch.bfloat16) is torch.bfloat16
    assert ir.choose_transfer_dtype(torch.float16, torch.bfloat16) is torch.float16


class CountedBucket:
    """Stands in for a bucket; counts how many of its kind hold memory at once."""

    device = None

    def __init__(self, log: list[int]) -> None:
        self.log = log
        self.num_refusals = 2

    def prepare(self) -> None:
        self.log.append(1)

    def launch(self) -> bool:
        self.num_refusals -= 1
        return self.num_refusals < 0

    def is_complete(self) -> bool:
        return True

    def finalize(self) -> None:
        self.log.append(-1)


@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
def test_buckets_in_flight_are_bounded(max_in_flight: int) -> None:
    log: list[int] = []
    buckets: Any = [CountedBucket(log) for _ in range(9)]
    ir.bucket_comm(buckets, max_in_flight)
    assert max(itertools.accumulate(log)) == max_in_flight
    assert len(log) == 18
    with pytest.raises(ValueError, match="max_in_flight must be >= 1, got 0"):
        ir.bucket_comm(buckets, 0)


def test_a_failure_names_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.thread_transport.TIMEOUT_S", 0.05)
    transport = use_thread_transport(monkeypatch)

    def alone(rank: int) -> None:
        buckets = ir.chunk_to_bucket_ops([chunk_of(torch.zeros(2))], 100)
        ir.bucket_comm(buckets)

    with pytest.raises(PeerTimeoutError, match=r"from rank 0 to ranks \(1,\).*8 bytes") as raised:
        transport.run(1, alone)
    assert raised.value.ranks == (1,)


# ---------------------------------------------------------------------------------------------
# Reductions, over ranks as threads.


def test_members_of_a_reduction_that_ship_to_different_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 to 2 share a reduction; tensors go from 0, from 1, from 0, ... to rank 3."""
    transport: ThreadTransport = use_thread_transport(monkeypatch)
    meshes = [[0, 1, 2], [1, 0, 2]]
    tensors = [torch.full((4,), float(i)) for i in range(6)]
    landed = [torch.zeros(4) for _ in tensors]

    def run(rank: int) -> None:
        chunks = []
        for i, tensor in enumerate(tensors):
            m2m = ir.get_m2m_map(
                mesh_of(meshes[i % 2]), [Partial()], mesh_of([3]), [Replicate()], None
            )
            groups = transport.partial_groups(torch.tensor(meshes[i % 2]), [(0, "sum")])
            chunks += ir.m2m_to_chunks(m2m, rank, tensor, landed[i], None, groups)
        ir.bucket_comm(ir.chunk_to_bucket_ops(chunks, 1 << 20), 1)

    transport.run(4, run)
    assert [tensor[0].item() for tensor in landed] == [3.0 * i for i in range(6)]
    assert transport.num_reductions == 6


def test_every_member_of_a_reduction_reduces_a_cell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = use_thread_transport(monkeypatch)
    kinds: collections.Counter[str] = collections.Counter()
    landed = [torch.zeros(6) for _ in range(3)]

    def run(rank: int) -> None:
        m2m = ir.get_m2m_map(
            mesh_of(range(2)),
            [Partial()],
            mesh_of(range(3)),
            [Replicate()],
            None,
            global_shape=(6,),
        )
        groups = transport.partial_groups(torch.arange(2), [(0, "sum")])
        chunks = ir.m2m_to_chunks(m2m, rank, torch.ones(6), landed[rank], None, groups)
        kinds.update(f"{rank} {chunk.transfer_type.name}" for chunk in chunks)
        ir.bucket_comm(ir.chunk_to_bucket_ops(chunks, 8))

    transport.run(3, run)
    assert [tensor.tolist() for tensor in landed] == [[2.0] * 6] * 3
    # Rank 0 sends and keeps the cell, rank 1 keeps it.
    assert kinds == {"0 P2P": 1, "1 SELF_COPY": 1, "2 P2P": 1}
    assert transport.num_reductions == 1
