"""SMs of a GPU that kernels of a rank occupy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moe_comm.peers.cuda_devices import DeviceIdentity

NUM_SMS_AT_MOST = 24
"""SMs that keep memory busy by copies; experts have better use for more."""


def default_num_sms(devices: Sequence[DeviceIdentity]) -> int:
    """SMs for the kernels of one buffer of one rank, the same on every rank.

    As many as keep memory busy, but no more than an equal share of half the device among the ranks
    on it: the other half is for experts.
    """
    return max(1, min(NUM_SMS_AT_MOST, *(_share(devices, device) // 2 for device in devices)))


def problem_with_sms(devices: Sequence[DeviceIdentity], num_sms: int, num_claimed: int) -> str:
    """Return the problem of `num_sms` more on every rank that has claimed `num_claimed`; "" if there is none.

    Kernels of ranks that share a GPU wait for each other, so all of them must fit at once. Every
    rank comes to the same verdict.
    """
    for device in devices:
        num_sharing = Counter(peer.uuid for peer in devices)[device.uuid]
        wanted = (num_claimed + num_sms) * num_sharing
        if wanted > device.num_sms:
            return (
                f"{num_sharing} ranks with {num_claimed + num_sms} SMs each, over all their "
                f"buffers, need {wanted} SMs; {device.name} has {device.num_sms}"
            )
    return ""


def _share(devices: Sequence[DeviceIdentity], device: DeviceIdentity) -> int:
    return device.num_sms // Counter(peer.uuid for peer in devices)[device.uuid]
