"""A small Mixture-of-Experts layer on `moe_comm.dispatcher.TokenDispatcher`, and its parts."""

from __future__ import annotations

from moe_comm.nn.experts import GroupedExperts
from moe_comm.nn.layer import MoELayer
from moe_comm.nn.router import Routing, TopKRouter

__all__ = ["GroupedExperts", "MoELayer", "Routing", "TopKRouter"]
