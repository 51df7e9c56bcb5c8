"""Resources that the pipeline runs on, and the pipeline."""

from moe_comm.resharding.nvshmem_copy_service.core.gpu_resource_manager import GPUResourceManager
from moe_comm.resharding.nvshmem_copy_service.core.kernel_launcher import KernelLauncher
from moe_comm.resharding.nvshmem_copy_service.core.pipeline_executor import PipelineExecutor

__all__ = ["GPUResourceManager", "KernelLauncher", "PipelineExecutor"]
