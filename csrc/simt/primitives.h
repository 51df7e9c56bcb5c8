#pragma once

// The vocabulary of device/primitives.h on CPU fibers. Threads of a grid are fibers of one
// scheduler (simt/grid.h), and every access goes through simt/memory.h.

#include <cxxabi.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <typeinfo>

#include "core/dtype.h"
#include "core/error.h"
#include "device/launch.h"
#include "simt/grid.h"
#include "simt/memory.h"
#include "simt/plain_access.h"
#include "simt/scheduler.h"

#define MOE_KERNEL
#define MOE_KERNEL_OF(most_threads)
#define MOE_DEVICE inline
#define MOE_DEVICE_CALLED inline

namespace moe::device {

// --- Thread -------------------------------------------------------------------------------------

inline int thread_idx() {
  return simt::current_thread().thread_idx;
}
inline int num_threads() {
  return simt::current_thread().block->grid->num_threads();
}
inline int block_idx() {
  return simt::current_thread().block->block_idx;
}
inline int num_blocks() {
  return simt::current_thread().block->grid->num_blocks();
}
inline int lane_idx() {
  return thread_idx() % simt::kWarpSize;
}
inline int warp_idx() {
  return thread_idx() / simt::kWarpSize;
}
inline int num_warps() {
  return num_threads() / simt::kWarpSize;
}

// --- Plain access -------------------------------------------------------------------------------

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

namespace emulated {

template <typename T>
constexpr bool kIsWord = std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);
template <typename T>
constexpr bool kIsPlain = std::is_trivially_copyable_v<T> &&
                          (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 16 || kIsWord<T>);

template <typename T>
uint64_t to_word(T value) {
  if constexpr (sizeof(T) == 8)
    return std::bit_cast<uint64_t>(value);
  else
    return std::bit_cast<uint32_t>(value);
}

template <typename T>
T from_word(uint64_t word) {
  if constexpr (sizeof(T) == 8)
    return std::bit_cast<T>(word);
  else
    return std::bit_cast<T>(static_cast<uint32_t>(word));
}

}  // namespace emulated

template <typename T>
T load(const T* from) {
  static_assert(emulated::kIsPlain<T>);
  std::remove_const_t<T> value;
  simt::memory::load_plain<sizeof(T)>(from, &value);
  return value;
}

template <typename T>
T load_constant(const T* from) {
  static_assert(emulated::kIsPlain<T>);
  std::remove_const_t<T> value;
  simt::memory::load_constant_plain<sizeof(T)>(from, &value);
  return value;
}

template <typename T>
void store(T* to, std::type_identity_t<T> value) {
  static_assert(emulated::kIsPlain<T>);
  simt::memory::store_plain<sizeof(T)>(to, &value);
}

template <typename T>
void store_streaming(T* to, std::type_identity_t<T> value) {
  store(to, value);
}

// --- Words that threads agree by ----------------------------------------------------------------

using Scope = simt::Reach;

template <Scope kScope, typename T>
T load_relaxed(const T* from) {
  static_assert(emulated::kIsWord<T>);
  return emulated::from_word<T>(
      simt::memory::atomic_load(from, sizeof(T), simt::Order::kRelaxed, kScope));
}

template <Scope kScope, typename T>
T load_acquire(const T* from) {
  static_assert(emulated::kIsWord<T>);
  return emulated::from_word<T>(
      simt::memory::atomic_load(from, sizeof(T), simt::Order::kAcquire, kScope));
}

template <Scope kScope, typename T>
void store_relaxed(T* to, std::type_identity_t<T> value) {
  static_assert(emulated::kIsWord<T>);
  simt::memory::atomic_store(
      to, emulated::to_word(value), sizeof(T), simt::Order::kRelaxed, kScope);
}

template <Scope kScope, typename T>
void store_release(T* to, std::type_identity_t<T> value) {
  static_assert(emulated::kIsWord<T>);
  simt::memory::atomic_store(
      to, emulated::to_word(value), sizeof(T), simt::Order::kRelease, kScope);
}

template <Scope kScope, typename T>
T add_relaxed(T* to, std::type_identity_t<T> value) {
  static_assert(emulated::kIsWord<T> && std::is_integral_v<T>);
  return emulated::from_word<T>(simt::memory::atomic_add(
      to, emulated::to_word(value), sizeof(T), simt::Order::kRelaxed, kScope));
}

template <Scope kScope, typename T>
T add_acq_rel(T* to, std::type_identity_t<T> value) {
  static_assert(emulated::kIsWord<T> && std::is_integral_v<T>);
  return emulated::from_word<T>(simt::memory::atomic_add(
      to, emulated::to_word(value), sizeof(T), simt::Order::kAcquireRelease, kScope));
}

template <Scope kScope>
void fence() {
  simt::memory::fence(kScope);
}

// --- Proxies ------------------------------------------------------------------------------------

inline void fence_proxy_async() {
  simt::memory::fence_proxy(simt::Space::kAll);
}
inline void fence_proxy_async_shared() {
  simt::memory::fence_proxy(simt::Space::kShared);
}

// --- Block and warp -----------------------------------------------------------------------------

inline void sync_block() {
  simt::sync_block();
}
inline void sync_warp() {
  simt::sync_warp();
}
template <typename T>
T shuffle(T value, int src_lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(simt::Warp::Value));
  simt::Warp::Value bits{};
  std::memcpy(&bits, &value, sizeof(T));
  bits = simt::shuffle(bits, src_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
T shuffle_xor(T value, int mask) {
  return shuffle(value, lane_idx() ^ mask);
}

/// Value of the lane @p distance below; the lowest lanes keep their own value.
template <typename T>
T shuffle_up(T value, int distance) {
  const int src_lane = lane_idx() - distance;
  return shuffle(value, src_lane >= 0 ? src_lane : lane_idx());
}

inline uint32_t ballot(bool vote) {
  return simt::ballot(vote);
}
inline bool any(bool vote) {
  return simt::ballot(vote) != 0;
}
inline bool all(bool vote) {
  return simt::ballot(vote) == ~0u;
}
inline uint32_t match_any(uint32_t value) {
  return simt::match_any(value);
}
inline int population(uint32_t bits) {
  return std::popcount(bits);
}
inline int first_bit(uint32_t bits) {
  return bits == 0 ? -1 : std::countr_zero(bits);
}

// --- Shared memory ------------------------------------------------------------------------------

inline std::byte* shared_memory() {
  return simt::current_thread().block->shared;
}

template <typename T>
T load_shared(const T* from) {
  simt::check_shared(from, sizeof(T));
  return load(from);
}

template <typename T>
T add_shared(T* to, std::type_identity_t<T> value) {
  return add_relaxed<Scope::kBlock>(to, value);
}

// --- Bulk copies --------------------------------------------------------------------------------

using MBarrier = uint64_t;
constexpr bool kHasBulkCopies = true;

inline void init_mbarrier(MBarrier* barrier, int num_arrivals) {
  simt::memory::init_mbarrier(barrier, num_arrivals);
}
inline void fence_mbarrier_init() {
  simt::memory::fence_mbarrier_init();
}
inline void arrive_expect(MBarrier* barrier, uint32_t bytes) {
  simt::memory::arrive_expect(barrier, bytes);
}
inline bool try_wait(MBarrier* barrier, uint32_t parity) {
  return simt::memory::try_wait(barrier, parity);
}
inline void bulk_load(std::byte* shared,
                      const std::byte* global,
                      uint32_t bytes,
                      MBarrier* barrier) {
  simt::memory::bulk_load(shared, global, bytes, barrier);
}
inline void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
  simt::memory::bulk_store(global, shared, bytes);
}
inline void commit_bulk_stores() {
  simt::memory::commit_bulk_stores();
}
template <int num_pending>
void await_bulk_stores() {
  simt::memory::await_bulk_stores(num_pending);
}
template <int num_pending>
void await_bulk_reads() {
  simt::memory::await_bulk_reads(num_pending);
}

// --- Puts ---------------------------------------------------------------------------------------

inline void put_signal(
    int pe, std::byte* to, const std::byte* from, int64_t bytes, uint64_t* signal, uint64_t value) {
  sync_warp();
  if (lane_idx() == 0)
    simt::memory::put_signal(pe, to, from, bytes, signal, value);
}
inline void take_put(const uint64_t* signal, uint64_t /*value*/) {
  simt::memory::take_put(signal);
}
inline void quiet() {
  if (lane_idx() == 0)
    simt::memory::quiet();
  sync_warp();
}

// --- Arithmetic ---------------------------------------------------------------------------------

// Never fused: the project is compiled with -ffp-contract=off.
inline float multiply(float a, float b) {
  return a * b;
}
inline float add(float a, float b) {
  return a + b;
}
inline float divide(float a, float b) {
  return a / b;
}
inline double multiply(double a, double b) {
  return a * b;
}
inline double add(double a, double b) {
  return a + b;
}
inline double divide(double a, double b) {
  return a / b;
}

using moe::bfloat16_to_float;
using moe::float_to_bfloat16;
inline float half_to_float(uint16_t bits) {
  return float16_to_float(bits);
}
inline uint16_t float_to_half(float value) {
  return float_to_float16(value);
}
inline uint32_t float_bits(float value) {
  return std::bit_cast<uint32_t>(value);
}
inline float bits_float(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

// --- Time ---------------------------------------------------------------------------------------

inline uint64_t now_ns() {
  return simt::Scheduler::current()->now_ns();
}
inline void pause(uint32_t nanoseconds) {
  simt::Scheduler::current()->idle(nanoseconds);
}

// --- Launch -------------------------------------------------------------------------------------

inline void await_prerequisites() {
  simt::await_prerequisites();
}
inline void launch_dependents() {
  simt::launch_dependents();
}

namespace emulated {

/// "DispatchParams", for reports.
template <typename Params>
std::string params_name() {
  char* const demangled = abi::__cxa_demangle(typeid(Params).name(), nullptr, nullptr, nullptr);
  std::string name = demangled != nullptr ? demangled : typeid(Params).name();
  std::free(demangled);
  return name.substr(name.rfind(':') + 1);
}

}  // namespace emulated

/// @throws InvalidArgument  the shape is not one that a device takes, or the launch has no stream.
template <typename Params>
void launch(void (*kernel)(Params), const Launch& shape, const Params& params) {
  static const std::string name = emulated::params_name<Params>();
  MOE_CHECK(shape.stream != nullptr, "the launch of ", name, " names no stream");
  static_cast<simt::Stream*>(shape.stream)->launch({name, shape, [kernel, params] {
                                                      kernel(params);
                                                    }});
}

}  // namespace moe::device
