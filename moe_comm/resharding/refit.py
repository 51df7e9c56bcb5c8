"""Megatron's `core.resharding.refit`: its names, of `moe_comm.resharding.hold`."""

from moe_comm.resharding.hold.plan_cache import PlanCacheKey as _PlanCacheKey
from moe_comm.resharding.hold.refit import (
    Refit,
    clear_all_caches,
    clear_plan_cache,
    prepare_swap_model_weights,
    reshard_model_weights,
    swap_model_weights,
)
from moe_comm.resharding.hold.refit_models import (
    _harmonize_buffer_dtypes,
    _needs_mxfp8_conversion,
    _setup_mxfp8_transform_on_plan,
)
from moe_comm.resharding.hold.refit_options import Verify
from moe_comm.resharding.hold.refit_services import (
    RefitBackendName,
    clear_service_cache,
    get_or_create_service,
)

__all__ = [
    "Refit",
    "RefitBackendName",
    "Verify",
    "_PlanCacheKey",
    "_harmonize_buffer_dtypes",
    "_needs_mxfp8_conversion",
    "_setup_mxfp8_transform_on_plan",
    "clear_all_caches",
    "clear_plan_cache",
    "clear_service_cache",
    "get_or_create_service",
    "prepare_swap_model_weights",
    "reshard_model_weights",
    "swap_model_weights",
]
