"""The embedded default: CPU ranks of one machine over the shared-memory heap."""

from __future__ import annotations

from moe_comm import _host, env
from moe_comm.backends.native import NativeBackend, Settings

__all__ = ["HostBackend"]


class HostBackend(NativeBackend):
    """Operations by threads of the CPU; see `Backend`."""

    name = "host"
    _endpoint: _host.Endpoint

    def _create_endpoint(self, settings: Settings) -> _host.Endpoint:
        return _host.Endpoint.create(
            settings.group,
            settings.num_experts,
            settings.num_max_tokens,
            settings.expert_rank,
            settings.depth,
            env.force_isa() or "",
            settings.agreed,
        )

    @property
    def instruction_set(self) -> str:
        """Of the row kernels in use: "portable", "avx2" or "avx512"."""
        return self._endpoint.isa
