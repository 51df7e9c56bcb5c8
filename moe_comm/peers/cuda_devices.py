"""GPUs of this process: whether they can be used, and who shares one."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from types import ModuleType

import torch

from moe_comm import env
from moe_comm.peers.plain_data import travels

CUDA_MODULE = "moe_comm._cuda"
WITHOUT_P2P = 'backend="host" needs none and moves rows through the host\'s memory'


@travels
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """The GPU of one rank.

    Args:
        uuid: The same in every process that sees the device.
        name: Model.
        num_sms: SMs of the device.
        device_idx: Index in the rank's own numbering.
        process_id: Id of the rank's process; ranks may be threads of one process.
    """

    uuid: bytes
    name: str
    num_sms: int
    device_idx: int
    process_id: int


def load_cuda_module() -> ModuleType:
    """`moe_comm._cuda`.

    Raises:
        ImportError: It was not built.
    """
    return importlib.import_module(CUDA_MODULE)


def unusable_reason(device_idx: int) -> str | None:
    """Why this process cannot use a GPU, or None."""
    try:
        native = load_cuda_module()
    except ImportError as error:
        return (
            f"{CUDA_MODULE} cannot be imported ({error}): it is built where nvcc is found, see "
            f"MOE_COMM_CUDA in docs/environment.md; {WITHOUT_P2P}"
        )
    count, reason = native.count_devices()
    if count == 0:
        return f"there is no usable GPU: {reason}"
    if not 0 <= device_idx < count:
        return f"device cuda:{device_idx} is not among the {count} that the driver shows"
    return None


def identify(device_idx: int) -> DeviceIdentity:
    """The device of that number."""
    found = load_cuda_module().describe_device(device_idx)
    return DeviceIdentity(
        uuid=found["uuid"],
        name=found["name"],
        num_sms=found["num_sms"],
        device_idx=device_idx,
        process_id=os.getpid(),
    )


def take_device(rank_idx: int) -> None:
    """Make a GPU current on the calling thread, in turn by rank: for ranks that nobody gave one."""
    torch.cuda.set_device(rank_idx % torch.cuda.device_count())


def take_stream(rank_idx: int) -> None:
    """Take the device as `take_device` does, with its own stream on that GPU: for ranks that are threads.

    Threads share the default stream: what one rank puts there would wait for a kernel of another that
    waits for that rank.
    """
    take_device(rank_idx)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def max_connections(own: DeviceIdentity, devices: Sequence[DeviceIdentity]) -> int:
    """Return the number of streams of its GPU that a rank may use, 0 for any number.

    Streams beyond `CUDA_DEVICE_MAX_CONNECTIONS` wait for each other in the order of their launches. That
    is no harm to a rank, which launches in one order everywhere, unless another rank of its process,
    for whose rows it waits, is behind it. Megatron sets 1.

    Args:
        own: GPU of the rank.
        devices: Devices of all ranks, its own among them.
    """
    sharing = [
        each for each in devices if (each.uuid, each.process_id) == (own.uuid, own.process_id)
    ]
    return env.cuda_max_connections() if len(sharing) > 1 else 0


def problem_with_devices(
    rank_idx: int, devices: Sequence[DeviceIdentity], local_ranks: Sequence[int]
) -> str | None:
    """Return the reason that the GPU of `rank_idx` cannot reach those of `local_ranks`, its node; or None.

    Devices that this process does not see are not asked about: opening their memory tells.
    """
    native = load_cuda_module()
    count, _ = native.count_devices()
    visible = {native.describe_device(idx)["uuid"]: idx for idx in range(count)}
    own = devices[rank_idx]
    for peer_idx in local_ranks:
        peer = devices[peer_idx]
        peer_device_idx = visible.get(peer.uuid)
        if peer_device_idx is None or native.can_reach(own.device_idx, peer_device_idx):
            continue
        return (
            f"its GPU ({own.name}, cuda:{own.device_idx}) does not reach that of rank {peer_idx} "
            f"({peer.name}): the driver offers no peer-to-peer access (P2P) between them, over NVLink or "
            f"PCIe, as nvidia-smi topo -p2p r tells; {WITHOUT_P2P}"
        )
    return None
