"""Transports of reshard plans: over the symmetric heap, Gloo, NCCL and the NVSHMEM pipeline."""
