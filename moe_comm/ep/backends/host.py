"""The embedded default: CPU ranks over a shared-memory heap a node, and a rail between nodes."""

from __future__ import annotations

from typing import Protocol

from moe_comm import _host, env
from moe_comm.ep.backends.native import NativeBackend, Settings
from moe_comm.ep.backends.native_endpoint import NativeGroupOwner
from moe_comm.ep.backends.rails import RailEngine, RailOwner, make_rail
from moe_comm.ep.config import EpConfig


class _NodeOwner(NativeGroupOwner, RailOwner, Protocol):
    """Interface that this backend needs of a communicator."""

    check_messages: bool


class HostBackend(NativeBackend):
    """Operations by threads of the CPU; see `Backend`."""

    name = "host"
    has_node_reduction = True
    has_rank_reduction = True
    _endpoint: _host.Endpoint
    _rail_engine: RailEngine | None = None

    def __init__(self, communicator: _NodeOwner, config: EpConfig) -> None:
        self._checks_messages = communicator.check_messages
        self._rail_engine = make_rail(communicator)
        try:
            super().__init__(communicator, config)
        except BaseException:
            self._close_rail()
            raise

    def _create_endpoint(self, settings: Settings) -> _host.Endpoint:
        rail = None if self._rail_engine is None else self._rail_engine.rail
        return _host.Endpoint.create(settings, env.force_isa() or "", rail, self._checks_messages)

    @property
    def instruction_set(self) -> str:
        """Instruction set of the row kernels in use: "portable", "avx2" or "avx512"."""
        return self._endpoint.isa

    def internode_bytes(self) -> tuple[int, int]:
        return self._endpoint.internode_bytes()

    def destroy(self) -> None:
        try:
            super().destroy()  # ends what is in flight, which needs the rail
        finally:
            self._close_rail()

    def _close_rail(self) -> None:
        engine, self._rail_engine = self._rail_engine, None
        if engine is not None:
            engine.close()
