// Tiny kernels that put: each rule of puts once right, and once per way to break it.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/primitives.h"
#include "schedules/run.h"

namespace moe::simt::checker {
namespace {

using device::Scope;

/// Arguments of a kernel; every rank has one, and is a node of its own.
struct PutParams {
  int rank_idx = 0;
  uint64_t* words = nullptr;         ///< symmetric: [8] sent, [8] received, [2] signals
  uint64_t* remote_words = nullptr;  ///< the other rank's
  uint64_t* own = nullptr;           ///< device memory of the rank: 8 words
  uint64_t* result = nullptr;        ///< device memory of the rank

  uint64_t* received() const { return words + 8; }
  uint64_t* signal(int i) const { return words + 16 + i; }
};

/// Runs @p kernel by a warp on each of two ranks.
void run_on_two_nodes(Run& run, void (*kernel)(PutParams)) {
  GuestMemory& guest = run.guest();
  const auto words = [](std::byte* address) { return reinterpret_cast<uint64_t*>(address); };
  guest.set_nodes(1);
  std::vector<std::byte*> symmetric;
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx)
    symmetric.push_back(guest.allocate(192, Ownership::kHeap, rank_idx, "symmetric", true));
  guest.make_symmetric(symmetric);
  RankStream streams[2] = {{run, 0}, {run, 1}};
  uint64_t* results[2];
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx) {
    PutParams params;
    params.rank_idx = rank_idx;
    params.words = words(symmetric[static_cast<size_t>(rank_idx)]);
    params.remote_words = words(symmetric[static_cast<size_t>(1 - rank_idx)]);
    params.own = words(guest.allocate(64, Ownership::kDevice, rank_idx, "own", true));
    params.result = words(guest.allocate(64, Ownership::kDevice, rank_idx, "result", true));
    results[rank_idx] = params.result;
    device::Launch shape;
    shape.stream = static_cast<simt::Stream*>(&streams[rank_idx]);
    device::launch(kernel, shape, params);
  }
  run.scheduler().run();
  for (const uint64_t* const result : results) {
    const auto seen = *reinterpret_cast<const uint64_t*>(guest.real(result));
    if (seen != 0 && seen != 42)
      run.report(Kind::kResult, "a stale value was read");
  }
}

/// A lane writes what is sent.
void write_source(const PutParams& params, uint64_t value) {
  if (device::lane_idx() == 3)
    device::store(params.words, value);
}

/// Puts the first word, with a signal.
void put(const PutParams& params, int signal) {
  device::put_signal(1,
                     reinterpret_cast<std::byte*>(params.received()),
                     reinterpret_cast<const std::byte*>(params.words),
                     8,
                     params.signal(signal),
                     1);
}

void receive(const PutParams& params, int signal, bool is_taken = true) {
  if (device::lane_idx() != 0)
    return;
  while (device::load_acquire<Scope::kSystem>(params.signal(signal)) != 1)
    device::pause(32);
  if (is_taken)
    device::take_put(params.signal(signal), 1);
  device::store(params.result, device::load(params.received()) == 7 ? uint64_t{42} : uint64_t{1});
}

void pass(PutParams params) {
  if (params.rank_idx == 1)
    return receive(params, 0);
  write_source(params, 7);
  put(params, 0);
  device::quiet();
  write_source(params, 8);
}
MOE_SCENARIO(litmus_put, "a put, its signal, and its source written again after quiet()") {
  run_on_two_nodes(run, &pass);
}

void pass_untaken(PutParams params) {
  if (params.rank_idx == 1)
    return receive(params, 0, false);
  write_source(params, 7);
  put(params, 0);
  device::quiet();
}
MOE_WRONG_SCENARIO(litmus_put_untaken, "bytes are read before the put was taken") {
  run_on_two_nodes(run, &pass_untaken);
}

void pass_and_rewrite(PutParams params) {
  if (params.rank_idx == 1)
    return receive(params, 0);
  write_source(params, 7);
  put(params, 0);
  write_source(params, 8);
  device::quiet();
}
MOE_WRONG_SCENARIO(litmus_put_rewritten, "the source is written again before quiet()") {
  run_on_two_nodes(run, &pass_and_rewrite);
}

void pass_and_end(PutParams params) {
  if (params.rank_idx == 1)
    return receive(params, 0);
  write_source(params, 7);
  put(params, 0);
}
MOE_WRONG_SCENARIO(litmus_put_unfinished, "the kernel ends while its put may read the source") {
  run_on_two_nodes(run, &pass_and_end);
}

void pass_behind(PutParams params) {
  if (params.rank_idx == 1)
    return receive(params, 1);
  write_source(params, 7);
  put(params, 0);
  device::put_signal(1, nullptr, nullptr, 0, params.signal(1), 1);
  device::quiet();
}
MOE_WRONG_SCENARIO(litmus_put_of_other_signal, "the signal of a later put says nothing of this") {
  run_on_two_nodes(run, &pass_behind);
}

void pass_after_quiet(PutParams params) {
  if (params.rank_idx == 1)
    return receive(params, 1);
  write_source(params, 7);
  put(params, 0);
  device::quiet();
  device::put_signal(1, nullptr, nullptr, 0, params.signal(1), 1);
  device::quiet();
}
MOE_SCENARIO(litmus_put_behind_quiet,
             "a signal that is put after quiet() tells of what came before") {
  run_on_two_nodes(run, &pass_after_quiet);
}

void store_remote(PutParams params) {
  if (params.rank_idx == 0 && device::lane_idx() == 0)
    device::store(params.remote_words, 7);
}
MOE_WRONG_SCENARIO(litmus_remote_store, "memory of another node is reached by puts alone") {
  run_on_two_nodes(run, &store_remote);
}

void put_private(PutParams params) {
  if (params.rank_idx != 0)
    return;
  device::put_signal(1,
                     reinterpret_cast<std::byte*>(params.received()),
                     reinterpret_cast<const std::byte*>(params.own),
                     8,
                     params.signal(0),
                     1);
  device::quiet();
}
MOE_WRONG_SCENARIO(litmus_put_private, "what is put lies in symmetric memory") {
  run_on_two_nodes(run, &put_private);
}

}  // namespace
}  // namespace moe::simt::checker
