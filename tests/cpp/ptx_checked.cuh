#pragma once

// The vocabulary of device/ptx.cuh for a static checker of PTX, which knows no loop that polls and
// no bulk copy to global memory: a wait for an mbarrier ends when it has flipped, and a bulk store
// is a loop of ordinary accesses of the lane that issues it.

#define try_wait try_wait_once
#define bulk_store bulk_store_at_once
#include "device/ptx.cuh"
#undef try_wait
#undef bulk_store

namespace moe::device {

MOE_DEVICE bool try_wait(MBarrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
      "@is_done bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(ptx::shared_address(barrier)),
      "r"(parity)
      : "memory");
  return true;
}

MOE_DEVICE void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
#pragma unroll
  for (uint32_t offset = 0; offset < bytes; offset += sizeof(Bytes16))
    store(reinterpret_cast<Bytes16*>(global + offset),
          load_shared(reinterpret_cast<const Bytes16*>(shared + offset)));
}

}  // namespace moe::device
