"""Weights and gradients of experts that lie on several ranks."""

from __future__ import annotations

from moe_comm.replicas.copies import ReplicaCopies
from moe_comm.replicas.gradients import GradientReduction
from moe_comm.replicas.plan import ReplicaMove, ReplicaPlan, owners_of, plan_replicas
from moe_comm.replicas.prefetch import Prefetch

__all__ = [
    "GradientReduction",
    "Prefetch",
    "ReplicaCopies",
    "ReplicaMove",
    "ReplicaPlan",
    "owners_of",
    "plan_replicas",
]
