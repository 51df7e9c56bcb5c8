#pragma once

#include <cstddef>
#include <cstdint>

// Every access of emulated threads to shared, device and heap memory but the plain ones, which
// simt/plain_access.h has. There are two implementations:
//   direct_memory.cpp (the module _simt)   the access itself, atomics across processes
//   tests/schedules/checked_memory.cpp     delays and reorders stores and bulk copies, keeps clocks
//                                          and bounds, and may run other threads first
// Addresses are those that kernels hold. In the checker nothing is mapped there, so that an access
// past these functions faults.

namespace moe::simt {

enum class Order : uint8_t { kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Reach : uint8_t { kBlock, kDevice, kSystem };  ///< device::Scope
enum class Space : uint8_t { kShared, kAll };

namespace memory {

/// @throws EmulationError  names the thread, the address and what it is to be a multiple of.
[[noreturn]] void throw_misaligned(const void* address, size_t bytes);

// Words of 4 or 8 bytes.
uint64_t atomic_load(const void* from, size_t bytes, Order order, Reach reach);
void atomic_store(void* to, uint64_t value, size_t bytes, Order order, Reach reach);
uint64_t atomic_add(void* to, uint64_t value, size_t bytes, Order order, Reach reach);
void fence(Reach reach);        ///< acquire and release
void fence_proxy(Space space);  ///< between loads and stores, and bulk copies

// Bulk copies of the calling thread.
void init_mbarrier(uint64_t* barrier, int num_arrivals);
void fence_mbarrier_init();
void arrive_expect(uint64_t* barrier, uint32_t bytes);
bool try_wait(uint64_t* barrier, uint32_t parity);
void bulk_load(std::byte* shared, const std::byte* global, uint32_t bytes, uint64_t* barrier);
void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes);
void commit_bulk_stores();
void await_bulk_stores(int num_pending);
void await_bulk_reads(int num_pending);

// Puts of the calling thread, by whatever joins nodes: nic.h in the module _simt.
void put_signal(
    int pe, std::byte* to, const std::byte* from, int64_t bytes, uint64_t* signal, uint64_t value);
/// By the thread that has acquired what the signal of a put holds.
void take_put(const uint64_t* signal);
void quiet();

// Told by the emulator. A thread is the number of its fiber in the scheduler that runs it.

/// Threads have met at a barrier that orders their accesses (block or warp).
void met(const int* threads, int num_threads);
/// Shared memory of a block that starts, aligned to 128; what it holds is nobody's. Null for none.
std::byte* allocate_shared(size_t bytes, int rank_idx, int block_idx);
void free_shared(std::byte* shared, size_t bytes);

}  // namespace memory
}  // namespace moe::simt
