#pragma once

// The vocabulary of device/primitives.h where kernels reach GPUs of other nodes: that of
// device/ptx.cuh, and puts by NVSHMEM's device functions.

#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/ptx.cuh"
