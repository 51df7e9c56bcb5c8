"""Moving a model into the symmetric heap: same objects, same values, new memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_comm
from moe_comm.errors import CapacityError
from moe_comm.resharding.hold.heap_parameters import place_in_heap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("bias", torch.arange(7, dtype=torch.float64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(3.0))


def in_heap(communicator: moe_comm.Communicator, tensor: torch.Tensor) -> bool:
    num_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    assert num_bytes > 0
    return communicator.require_native().find(tensor.data_ptr(), 1) is not None


def test_objects_values_and_state_dicts_stay(communicator: moe_comm.Communicator) -> None:
    torch.manual_seed(0)
    net = Net()
    net.embedding.weight.grad = torch.ones_like(net.embedding.weight)
    parameters = dict(net.named_parameters())
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters())
    num_bytes = place_in_heap(net, communicator)
    assert num_bytes >= sum(p.numel() * p.element_size() for p in parameters.values())
    assert all(parameters[name] is parameter for name, parameter in net.named_parameters())
    state = net.state_dict()
    assert state.keys() == before.keys()
    for name, value in state.items():
        assert torch.equal(value, before[name]), name
        assert value.numel() == 0 or in_heap(communicator, value), name
        assert value.data_ptr() % value.element_size() == 0
    assert not in_heap(communicator, net.scratch)
    assert net.head.weight.data_ptr() == net.embedding.weight.data_ptr()
    assert net.embedding.weight.grad.sum() == 88

    optimizer.step()
    net.load_state_dict(before)
    assert torch.equal(net.embedding.weight, before["embedding.weight"])
    assert in_heap(communicator, net.embedding.weight)


def test_moving_twice_moves_once(communicator: moe_comm.Communicator) -> None:
    net = Net()
    assert place_in_heap(net, communicator) > 0
    places = [p.data_ptr() for p in net.parameters()]
    assert place_in_heap(net, communicator) == 0
    assert [p.data_ptr() for p in net.parameters()] == places
    # Only what has left the heap is moved again.
    net.inner.weight.data = torch.ones(5, 8, dtype=torch.bfloat16)
    assert place_in_heap(net, communicator) == 128
    assert in_heap(communicator, net.inner.weight)
    assert net.inner.weight.sum() == 40


def test_views_of_one_memory_stay_views_of_it(communicator: moe_comm.Communicator) -> None:
    flat = torch.arange(24, dtype=torch.float32)
    outside = flat[1:2]
    net = nn.Module()
    net.register_buffer("flat", flat)
    net.rows = nn.Parameter(flat[6:18].view(3, 4))
    net.columns = nn.Parameter(flat.view(4, 6).mT)
    net.expanded = nn.Parameter(flat[2:3].expand(5))
    net.same_bytes = nn.Parameter(flat[20:22].view(torch.int32), requires_grad=False)
    strides = {name: p.stride() for name, p in net.named_parameters()}
    place_in_heap(net, communicator)
    assert {name: p.stride() for name, p in net.named_parameters()} == strides
    net.flat.mul_(2)
    assert torch.equal(net.rows, 2 * torch.arange(6, 18).float().view(3, 4))
    assert torch.equal(net.columns, 2 * torch.arange(24).float().view(4, 6).mT)
    assert net.expanded.tolist() == [4.0] * 5
    assert net.same_bytes.view(torch.float32).tolist() == [40.0, 42.0]
    assert outside == 1


def test_tensors_of_files_at_odd_addresses_keep_their_values(
    communicator: moe_comm.Communicator,
) -> None:
    file = torch.randint(0, 100, (200,), dtype=torch.uint8).numpy()
    net = nn.Module()
    for dtype, offset in ((torch.float32, 5), (torch.bfloat16, 47), (torch.float64, 130)):
        tensor = torch.frombuffer(file, dtype=dtype, count=4, offset=offset)
        assert tensor.data_ptr() % tensor.element_size()
        net.register_buffer(f"at_{offset}", tensor)
    before = copy.deepcopy(net.state_dict())
    assert place_in_heap(net, communicator) == 3 * 64
    for name, tensor in net.named_buffers():
        assert in_heap(communicator, tensor)
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert torch.equal(tensor, before[name]), name
    net.one = nn.Parameter(torch.frombuffer(file, dtype=torch.float32, count=4, offset=5))
    net.other = nn.Parameter(torch.frombuffer(file, dtype=torch.bfloat16, count=2, offset=8))
    with pytest.raises(ValueError, match=r"float32 at .* and torch\.bfloat16 at .* they overlap"):
        place_in_heap(net, communicator)
    assert not in_heap(communicator, net.one)


def test_local_parts_of_dtensors_are_moved(communicator: moe_comm.Communicator) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        local = torch.arange(6.0).view(2, 3)
        tensor = DTensor.from_local(local, DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False)
        net = nn.Module()
        net.weight = nn.Parameter(tensor)
        assert place_in_heap(net, communicator) == 64
        moved = net.weight.to_local()
        assert in_heap(communicator, moved)
        assert torch.equal(moved, torch.arange(6.0).view(2, 3))
        assert net.weight.shape == (4, 3)
        assert place_in_heap(net, communicator) == 0
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_moved_is_named_and_nothing_moves(
    communicator: moe_comm.Communicator,
) -> None:
    net = Net()
    net.sparse = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"^sparse cannot be moved .* torch\.sparse_coo"):
        place_in_heap(net, communicator)
    net.sparse = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"^sparse cannot be moved .* meta"):
        place_in_heap(net, communicator)
    memory = torch.zeros(6)
    net.sparse = nn.Parameter(memory[2:])
    memory.untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"^sparse cannot be moved .* bytes \[8, 24\) of a storage of 0"
    ):
        place_in_heap(net, communicator)
    assert not in_heap(communicator, net.embedding.weight)


def test_a_heap_too_small_leaves_the_model_as_it_was() -> None:
    ranks = moe_comm.RankThreads(1)
    with moe_comm.Communicator(ranks[0], backend="host", max_heap_bytes=1 << 22) as communicator:
        net = nn.Sequential(nn.Linear(512, 512), nn.Linear(2048, 1024))
        live_bytes = communicator.heap_stats().live_bytes
        with pytest.raises(CapacityError):
            place_in_heap(net, communicator)
        assert not any(in_heap(communicator, p) for p in net.parameters())
        assert communicator.heap_stats().live_bytes == live_bytes


def test_the_heap_gets_its_memory_back(communicator: moe_comm.Communicator) -> None:
    live_bytes = communicator.heap_stats().live_bytes
    net = Net()
    num_bytes = place_in_heap(net, communicator)
    assert communicator.heap_stats().live_bytes >= live_bytes + num_bytes
    del net
    gc.collect()
    assert communicator.heap_stats().live_bytes == live_bytes
