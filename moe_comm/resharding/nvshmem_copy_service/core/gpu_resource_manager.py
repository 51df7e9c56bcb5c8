"""Who this PE is, its communicator, streams and events."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_comm import env
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.nvshmem_copy_service.core.host_stream import HostEvent, HostStream

__all__ = ["GPUResourceManager", "check_nvshmem"]

logger = logging.getLogger(__name__)

MIN_NVSHMEM_VERSION = (3, 6, 5)
MAX_CTAS = "2"
NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
STREAM_NAMES = ("pack", "unpack", "send", "copy")


def check_nvshmem(
    installed_version: str | None,
    max_ctas: str | None,
    *,
    min_version: Sequence[int] | None = MIN_NVSHMEM_VERSION,
    required_max_ctas: str | None = MAX_CTAS,
) -> None:
    """Refuse an NVSHMEM installation that is known to crash or hang.

    Args:
        installed_version: As the package states it; None where unknown, which is only logged.
        max_ctas: Value of `NVSHMEM_MAX_CTAS`, None when unset.
        min_version: Least version that is taken; None for any.
        required_max_ctas: What `max_ctas` must be; None for anything.

    Raises:
        RuntimeError: A rule above is broken; the message has both values.
    """
    if min_version is not None:
        wanted = ".".join(str(part) for part in min_version)
        if installed_version is None:
            logger.warning("the NVSHMEM version is unknown; at least %s is needed", wanted)
        else:
            found = tuple(int(part) for part in re.findall(r"\d+", installed_version)[:3])
            if found < tuple(min_version):
                raise RuntimeError(
                    f"NVSHMEM {installed_version} is installed, at least {wanted} is needed: "
                    "earlier ones crash where the PEs are split over NVLink domains"
                )
    if required_max_ctas is not None and max_ctas != required_max_ctas:
        raise RuntimeError(
            f"NVSHMEM_MAX_CTAS must be {required_max_ctas!r}, got {max_ctas!r}: initialization "
            "hangs with more"
        )


def _installed_nvshmem() -> str | None:
    for found in importlib.metadata.distributions():
        if found.name in NVSHMEM_PACKAGES:
            return found.version
    return None


class GPUResourceManager:
    """Connects the PEs and holds what the pipeline runs on.

    On the CPU, streams and events are `HostStream` and `HostEvent`.

    Args:
        device: "cpu"; "cuda" is checked for what it needs and then refused by this build.
        communicator: Over which PEs talk; None to make one of the group given to `init`.
        min_nvshmem_version: Least version that is taken; None for any, as
            `MEGATRON_NVSHMEM_ALLOW_UNSUPPORTED_VERSION=1` says too.
        required_max_ctas: What `NVSHMEM_MAX_CTAS` must be; None for anything.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        communicator: Communicator | None = None,
        *,
        min_nvshmem_version: Sequence[int] | None = MIN_NVSHMEM_VERSION,
        required_max_ctas: str | None = MAX_CTAS,
    ) -> None:
        self.device = torch.device(device)
        self.my_pe = -1
        self.n_pes = -1
        self.initialized = False
        self.communicator: Communicator | None = None
        self._given_communicator = communicator
        self._min_nvshmem_version = min_nvshmem_version
        self._required_max_ctas = required_max_ctas
        self._set_streams({})

    def init(self, group: dist.ProcessGroup | Bootstrap | None = None) -> None:
        """Connect. Collective over the group; does nothing when connected.

        Args:
            group: Ranks in it are the PEs; None for the default group, or where a communicator was
                given.

        Raises:
            RuntimeError: The device cannot be used.
            ValueError: The communicator has no heap, or both it and a group are given.
        """
        if self.initialized:
            return
        if group is not None and self._given_communicator is not None:
            raise ValueError(
                "a communicator was given, so group must be None, got "
                f"{group} and {self._given_communicator}"
            )
        if self.device.type != "cpu":
            self._refuse_device()
        self.communicator = self._given_communicator or Communicator(group)
        self.communicator.require_native()
        self.my_pe = self.communicator.rank_idx
        self.n_pes = self.communicator.num_ranks
        self._set_streams({name: HostStream(name) for name in STREAM_NAMES})
        self.initialized = True

    def _set_streams(self, streams: dict[str, HostStream]) -> None:
        self._streams = streams
        self.pack_stream = self.torch_pack_stream_wrapper = streams.get("pack")
        self.unpack_stream = self.torch_unpack_stream_wrapper = streams.get("unpack")
        self.send_stream = self.torch_send_stream_wrapper = streams.get("send")
        self.copy_stream = self.torch_copy_stream_wrapper = streams.get("copy")

    def _refuse_device(self) -> None:
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise RuntimeError(f"device must be cpu or an available cuda device, got {self.device}")
        if importlib.util.find_spec("nvshmem") is None:
            raise RuntimeError("nvshmem4py is not installed: pip install nvshmem4py-cu12")
        allows_any = env.nvshmem_allow_unsupported_version()
        check_nvshmem(
            _installed_nvshmem(),
            env.nvshmem_max_ctas(),
            min_version=None if allows_any else self._min_nvshmem_version,
            required_max_ctas=self._required_max_ctas,
        )
        raise RuntimeError("this build of moe_comm has no CUDA kernels: it moves CPU tensors")

    def get_stream(self, name: str) -> HostStream | None:
        """The stream "pack", "unpack", "send" or "copy"; None for another name or before `init`."""
        return self._streams.get(name)

    def get_torch_stream(self, name: str) -> HostStream | None:
        """What torch takes for that stream: on the CPU the same object."""
        return self.get_stream(name)

    def current_stream(self) -> HostStream:
        """The stream that the caller's own work on its tensors is in."""
        return HostStream("current")

    def create_events(
        self, num_events: int = 2
    ) -> tuple[list[HostEvent], list[HostEvent], list[HostEvent]]:
        """Events for packing, unpacking and arrival, `num_events` of each."""
        pack, unpack, arrival = ([HostEvent() for _ in range(num_events)] for _ in range(3))
        return pack, unpack, arrival

    def finalize(self) -> None:
        """Leave; a communicator that was given stays. Idempotent."""
        if self.communicator is not None and self._given_communicator is None:
            self.communicator.destroy()
        self.communicator = None
        self.initialized = False
        self.my_pe = -1
        self.n_pes = -1
        self._set_streams({})
