"""The place of Megatron's NIXL transport, which this package does not have.

It can be imported, as Megatron's callers do whichever transport they use.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["NO_NIXL", "NixlCopyService"]

NO_NIXL = "'nixl' needs a library that this package does not drive"


class NixlCopyService:
    """Cannot be made.

    Raises:
        ImportError: Always, as Megatron's does where the library is missing, which its callers expect.
    """

    def __new__(cls, group: Any = None, agent_name: str | None = None) -> NoReturn:
        """Say which services there are instead."""
        raise ImportError(
            f"{NO_NIXL}: take SymmetricCopyService (one machine), GlooCopyService, NCCLCopyService "
            "or NVSHMEMCopyService"
        )
