#pragma once

// The vocabulary of device/primitives.h where kernels reach GPUs of other nodes: that of
// device/ptx.cuh, and puts by NVSHMEM's device functions.

#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/ptx.cuh"

namespace moe::device {

MOE_DEVICE_CALLED void put_signal(
    int pe, std::byte* to, const std::byte* from, int64_t bytes, uint64_t* signal, uint64_t value) {
  // Writes and acquires of every lane come before the transfer, whoever reads memory for it: this
  // warp, a network card or a thread of NVSHMEM's.
  fence<Scope::kSystem>();
  sync_warp();
  if (bytes > 0)
    nvshmemx_putmem_signal_nbi_warp(
        to, from, static_cast<size_t>(bytes), signal, value, NVSHMEM_SIGNAL_SET, pe);
  else if (lane_idx() == 0)
    nvshmemx_signal_op(signal, value, NVSHMEM_SIGNAL_SET, pe);
  sync_warp();
}

MOE_DEVICE_CALLED void take_put(const uint64_t* signal, uint64_t value) {
  // Returns at once, after what NVSHMEM does where a card may deliver signals ahead of bytes.
  nvshmem_signal_wait_until(const_cast<uint64_t*>(signal), NVSHMEM_CMP_GE, value);
}

MOE_DEVICE_CALLED void quiet() {
  // A put to memory that is mapped here is stores of all lanes.
  fence<Scope::kSystem>();
  sync_warp();
  if (lane_idx() == 0)
    nvshmem_quiet();
  sync_warp();
}

}  // namespace moe::device
