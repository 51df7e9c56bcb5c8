#pragma once

// The vocabulary in which kernels are written: everything in which a GPU and the emulator differ.
//
// A build names the file that provides it: "device/ptx.cuh" (CUDA, inline assembly) or
// "simt/primitives.h" (CPU fibers). Both provide exactly the functions listed here, in namespace
// moe::device. Kernels touch shared memory, the heap and device memory through them only, never
// through a bare pointer: the emulator sees, delays, reorders and checks every access.
//
//   Thread
//     int thread_idx(), num_threads(), block_idx(), num_blocks(), lane_idx(), warp_idx(),
//     num_warps()
//   Programmatic dependent launch: of a kernel with Launch::is_dependent
//     void await_prerequisites()  returns when the kernels ahead in the stream have ended; what
//                                 they wrote can be read. By every thread, before anything else.
//                                 At once in a kernel that is not dependent
//     void launch_dependents()    by one thread of a block at least: as far as this block is
//                                 concerned, the kernel behind may start. From then on the block
//                                 waits for nobody that needs room on the device
//   Plain access, T of 1, 2, 4, 8 or 16 bytes and naturally aligned; never through a read-only
//   cache
//     T load(const T*), void store(T*, T)
//     T load_constant(const T*)      memory that nobody writes while the kernel runs; a dependent
//                                    one may do so before what is ahead of it has ended
//     void store_streaming(T*, T)    not read soon; an ordinary store where that is no different
//     struct Bytes16 { uint32_t words[4]; }
//   Words that threads agree by; Scope is kBlock, kDevice or kSystem; T is 4 or 8 bytes
//     T load_relaxed<Scope>(const T*), T load_acquire<Scope>(const T*)
//     void store_relaxed<Scope>(T*, T), void store_release<Scope>(T*, T)
//     T add_acq_rel<Scope>(T*, T), T add_relaxed<Scope>(T*, T)      return what was there
//     void fence<Scope>()                                           acquire and release
//   Proxies: bulk copies reach memory by another path than loads and stores
//     void fence_proxy_async()          what this thread wrote or acquired, before its bulk copies
//     void fence_proxy_async_shared()   the same for shared memory only
//   Block and warp
//     void sync_block(), void sync_warp()           all threads of it take part
//     T shuffle(T value, int src_lane), T shuffle_xor(T value, int mask), T shuffle_up(T value,
//     int) uint32_t ballot(bool), bool any(bool), bool all(bool), uint32_t match_any(uint32_t
//     value) int population(uint32_t), int first_bit(uint32_t)   number of bits; lowest bit or -1
//   Shared memory
//     std::byte* shared_memory()        dynamic, of Launch::shared_bytes, aligned to 128
//     T load_shared(const T*)           load() of shared memory, which need not ask whether it is
//     T add_shared(T*, T)               atomic in the block, relaxed, returns what was there
//   Bulk copies: 16-byte aligned addresses, a multiple of 16 bytes, asynchronous. One thread
//   issues.
//     using MBarrier = uint64_t         in shared memory
//     void init_mbarrier(MBarrier*, int num_arrivals), void fence_mbarrier_init()
//     void arrive_expect(MBarrier*, uint32_t bytes)       arrives and adds bytes to wait for
//     bool try_wait(MBarrier*, uint32_t parity)           acquires; does not wait for long
//     void bulk_load(std::byte* shared, const std::byte* global, uint32_t bytes, MBarrier*)
//     void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes)
//     void commit_bulk_stores()
//     void await_bulk_stores<num_pending>()     at most so many groups unfinished: written, for
//     this
//                                               thread
//     void await_bulk_reads<num_pending>()      shared memory may be written again, no more
//     constexpr bool kHasBulkCopies             of the architecture that is compiled for
//   Puts: bytes to a rank of another node, with a signal behind them. All lanes of a warp call with
//   equal arguments; only where a build names an engine ("device/nvshmem.cuh", the emulator).
//     void put_signal(int pe, std::byte* to, const std::byte* from, int64_t bytes,
//                     uint64_t* signal, uint64_t value)
//                                       returns at once. `to` and `signal` are places of this
//                                       rank's symmetric memory and stand for the same places of
//                                       `pe`; `from` is symmetric memory, too. 0 bytes: the signal
//                                       alone. What the lanes wrote or acquired before is what is
//                                       sent.
//     void take_put(const uint64_t* signal, uint64_t value)
//                                       by the thread that acquired `value` there: the bytes may be
//                                       read. Networks may deliver a signal through another path
//     void quiet()                      this warp's puts have been delivered
//   A thread that acquires `value` from `signal` (load_acquire<kSystem>) and takes the put sees the
//   bytes of that put and of no other: two puts, even of one thread to one rank, arrive in any
//   order. The source may be written again, and the kernel may end, only after quiet(). Bulk copies
//   of what came need fence_proxy_async(), as after every acquire.
//
//   Arithmetic, each rounded once and never fused
//     float multiply(float, float), add(float, float), divide(float, float); the same of double
//     float bfloat16_to_float(uint16_t), half_to_float(uint16_t)
//     uint16_t float_to_bfloat16(float), float_to_half(float)   nearest even, subnormals kept; NaN
//     to
//                                                               0x7FC0, 0x7E00
//     uint32_t float_bits(float), float bits_float(uint32_t)
//   Time
//     uint64_t now_ns()                 one clock for all ranks of a machine
//     void pause(uint32_t nanoseconds)  in a loop that waits
//   Launch (host code)
//     void launch(void (*kernel)(Params), const Launch&, const Params&)   in the order of its
//     stream
//
// MOE_KERNEL marks a kernel's definition, MOE_KERNEL_OF(n) that of one whose registers let a block
// of n threads run, MOE_DEVICE a function that is part of kernels, and MOE_DEVICE_CALLED one that
// they call: what is large, many times in one kernel and no part of a hot loop, so that the kernel
// fits the cache of instructions. It is given values: what a reference is to would have to lie in
// memory.

#include "device/launch.h"
#include MOE_DEVICE_PRIMITIVES
