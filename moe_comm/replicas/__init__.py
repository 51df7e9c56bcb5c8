"""Weights and gradients of experts that lie on several ranks."""

from __future__ import annotations

from moe_comm.replicas.balance_plan import LayerMove
from moe_comm.replicas.balancer import BalanceReport, ExpertBalancer
from moe_comm.replicas.copies import ReplicaCopies
from moe_comm.replicas.gradients import GradientReduction
from moe_comm.replicas.plan import ReplicaMove, ReplicaPlan, owners_of, plan_replicas
from moe_comm.replicas.prefetch import Prefetch

__all__ = [
    "BalanceReport",
    "ExpertBalancer",
    "GradientReduction",
    "LayerMove",
    "Prefetch",
    "ReplicaCopies",
    "ReplicaMove",
    "ReplicaPlan",
    "owners_of",
    "plan_replicas",
]
