// Tiny kernels that show what the checker finds and what it lets pass: each rule once right, and
// once per way to break it.

#include <csignal>
#include <cstddef>
#include <cstdint>

#include "device/primitives.h"
#include "schedules/run.h"

namespace moe::simt::checker {
namespace {

using device::Scope;

/// Arguments of a litmus kernel; every rank has one.
struct LitmusParams {
  int rank_idx = 0;
  uint64_t* data = nullptr;    ///< heap of rank 1: 8 words
  uint64_t* flag = nullptr;    ///< heap of rank 1
  uint64_t* own = nullptr;     ///< device memory of the rank: 64 words
  uint64_t* result = nullptr;  ///< device memory of the rank
};

using LitmusKernel = void (*)(LitmusParams);

/// Runs @p kernel on two ranks; both write to rank 1's heap.
void run_on_two_ranks(Run& run, LitmusKernel kernel, device::Launch shape = {}) {
  GuestMemory& guest = run.guest();
  const auto words = [](std::byte* address) { return reinterpret_cast<uint64_t*>(address); };
  auto* const data = words(guest.allocate(64, Ownership::kHeap, 1, "data", true));
  auto* const flag = words(guest.allocate(64, Ownership::kHeap, 1, "flag", true));
  RankStream streams[2] = {{run, 0}, {run, 1}};
  shape.shared_bytes = 512;
  uint64_t* results[2];
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx) {
    LitmusParams params;
    params.rank_idx = rank_idx;
    params.data = data;
    params.flag = flag;
    params.own = words(guest.allocate(512, Ownership::kDevice, rank_idx, "own", true));
    params.result = words(guest.allocate(64, Ownership::kDevice, rank_idx, "result", true));
    results[rank_idx] = params.result;
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

template <Scope kScope>
void await(const uint64_t* flag, uint64_t value) {
  while (device::load_acquire<kScope>(flag) != value)
    device::pause(32);
}

/// Result 42 for the right value: what was not yet there shows as something else.
void note(const LitmusParams& params, uint64_t seen) {
  device::store(params.result, seen == 7 ? uint64_t{42} : uint64_t{1});
}

template <Scope kWrite, Scope kRead>
void pass_message(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  if (params.rank_idx == 0) {
    device::store(params.data, 7);
    device::store_release<kWrite>(params.flag, 1);
  } else {
    await<kRead>(params.flag, 1);
    note(params, device::load(params.data));
  }
}

MOE_SCENARIO(litmus_message, "a value, then a flag released and acquired at system scope") {
  run_on_two_ranks(run, &pass_message<Scope::kSystem, Scope::kSystem>);
}
MOE_WRONG_SCENARIO(litmus_message_released_at_device, "the flag is released at device scope") {
  run_on_two_ranks(run, &pass_message<Scope::kDevice, Scope::kSystem>);
}
MOE_WRONG_SCENARIO(litmus_message_acquired_at_device, "the flag is acquired at device scope") {
  run_on_two_ranks(run, &pass_message<Scope::kSystem, Scope::kDevice>);
}

template <bool kFencedWrite, bool kFencedRead>
void pass_message_by_fences(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  if (params.rank_idx == 0) {
    device::store(params.data, 7);
    if (kFencedWrite)
      device::fence<Scope::kSystem>();
    device::store_relaxed<Scope::kSystem>(params.flag, 1);
  } else {
    while (device::load_relaxed<Scope::kSystem>(params.flag) != 1)
      device::pause(32);
    if (kFencedRead)
      device::fence<Scope::kSystem>();
    note(params, device::load(params.data));
  }
}

MOE_SCENARIO(litmus_fences, "a value, then a relaxed flag, with fences on both sides") {
  run_on_two_ranks(run, &pass_message_by_fences<true, true>);
}
MOE_WRONG_SCENARIO(litmus_fences_none_at_writer, "no fence between the value and its flag") {
  run_on_two_ranks(run, &pass_message_by_fences<false, true>);
}
MOE_WRONG_SCENARIO(litmus_fences_none_at_reader, "no fence between the flag and the value") {
  run_on_two_ranks(run, &pass_message_by_fences<true, false>);
}

template <bool kSync>
void share_in_block(LitmusParams params) {
  auto* const words = reinterpret_cast<uint64_t*>(device::shared_memory());
  device::store(words + device::thread_idx(), 7);
  if (kSync)
    device::sync_block();
  if (device::thread_idx() == 0)
    note(params, device::load(words + 31));
}

MOE_SCENARIO(litmus_block_barrier, "shared words written, a barrier, then read by others") {
  run_on_two_ranks(run, &share_in_block<true>);
}
MOE_WRONG_SCENARIO(litmus_block_barrier_missing, "the same without the barrier") {
  run_on_two_ranks(run, &share_in_block<false>);
}

template <bool kAll>
void meet_in_block(LitmusParams params) {
  if (kAll || device::thread_idx() < 16)
    device::sync_block();
  if (device::thread_idx() == 0)
    note(params, 7);
}
MOE_WRONG_SCENARIO(litmus_barrier_not_by_all, "half of the threads never come to the barrier") {
  run_on_two_ranks(run, &meet_in_block<false>);
}

template <bool kFenced>
void store_in_bulk(LitmusParams params) {
  auto* const words = reinterpret_cast<uint64_t*>(device::shared_memory());
  if (params.rank_idx == 0 && device::thread_idx() < 8)
    device::store(words + device::thread_idx(), 7);
  if (kFenced)
    device::fence_proxy_async_shared();
  device::sync_block();
  if (device::thread_idx() != 0)
    return;
  if (params.rank_idx == 0) {
    device::bulk_store(reinterpret_cast<std::byte*>(params.data), device::shared_memory(), 64);
    device::commit_bulk_stores();
    device::await_bulk_stores<0>();
    device::store_release<Scope::kSystem>(params.flag, 1);
  } else {
    await<Scope::kSystem>(params.flag, 1);
    note(params, device::load(params.data + 7));
  }
}

MOE_SCENARIO(litmus_bulk_store, "shared words, a proxy fence, a barrier, a bulk store") {
  run_on_two_ranks(run, &store_in_bulk<true>);
}
MOE_WRONG_SCENARIO(litmus_bulk_store_no_fence, "the same without the proxy fence") {
  run_on_two_ranks(run, &store_in_bulk<false>);
}

enum class Await { kWrites, kReads, kOneFewer, kNotCommitted };

template <Await kAwait>
void release_bulk_store(LitmusParams params) {
  auto* const words = reinterpret_cast<uint64_t*>(device::shared_memory());
  if (device::thread_idx() != 0)
    return;
  if (params.rank_idx == 0) {
    device::store(words + 0, 7);
    device::store(words + 1, 7);
    device::fence_proxy_async_shared();
    device::bulk_store(reinterpret_cast<std::byte*>(params.data), device::shared_memory(), 16);
    if (kAwait != Await::kNotCommitted)
      device::commit_bulk_stores();
    if (kAwait == Await::kReads)
      device::await_bulk_reads<0>();
    else if (kAwait == Await::kOneFewer)
      device::await_bulk_stores<1>();
    else
      device::await_bulk_stores<0>();
    device::store_release<Scope::kSystem>(params.flag, 1);
    device::await_bulk_reads<0>();
  } else {
    await<Scope::kSystem>(params.flag, 1);
    note(params, device::load(params.data));
  }
}

MOE_SCENARIO(litmus_bulk_written, "a bulk store awaited, then a flag") {
  run_on_two_ranks(run, &release_bulk_store<Await::kWrites>);
}
MOE_WRONG_SCENARIO(litmus_bulk_only_read, "only the source of the bulk store is awaited") {
  run_on_two_ranks(run, &release_bulk_store<Await::kReads>);
}
MOE_WRONG_SCENARIO(litmus_bulk_one_pending, "one bulk store is allowed to be pending") {
  run_on_two_ranks(run, &release_bulk_store<Await::kOneFewer>);
}
MOE_WRONG_SCENARIO(litmus_bulk_not_committed, "the bulk store belongs to no group") {
  run_on_two_ranks(run, &release_bulk_store<Await::kNotCommitted>);
}

template <bool kAwaited>
void reuse_source(LitmusParams params) {
  auto* const words = reinterpret_cast<uint64_t*>(device::shared_memory());
  if (device::thread_idx() != 0 || params.rank_idx != 0)
    return;
  device::store(words + 0, 7);
  device::store(words + 1, 7);
  device::fence_proxy_async_shared();
  device::bulk_store(reinterpret_cast<std::byte*>(params.data), device::shared_memory(), 16);
  device::commit_bulk_stores();
  if (kAwaited)
    device::await_bulk_reads<0>();
  device::store(words + 0, 8);
  device::await_bulk_stores<0>();
  note(params, device::load(params.data));
}

MOE_SCENARIO(litmus_bulk_source, "the source of a bulk store is written again once it was read") {
  run_on_two_ranks(run, &reuse_source<true>);
}
MOE_WRONG_SCENARIO(litmus_bulk_source_early, "the source is written again too early") {
  run_on_two_ranks(run, &reuse_source<false>);
}

enum class Load { kRight, kNoInitFence, kNoWait, kWrongParity, kFewBytes };

/// Rank 0 leaves a value in rank 1's heap, rank 1 loads it in bulk.
template <bool kFenced, Load kLoad>
void load_in_bulk(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  if (params.rank_idx == 0) {
    device::store(params.data, 7);
    device::store_release<Scope::kSystem>(params.flag, 1);
    return;
  }
  auto* const barrier = reinterpret_cast<device::MBarrier*>(device::shared_memory());
  std::byte* const stage = device::shared_memory() + 64;
  device::init_mbarrier(barrier, 1);
  if (kLoad != Load::kNoInitFence)
    device::fence_mbarrier_init();
  await<Scope::kSystem>(params.flag, 1);
  if (kFenced)
    device::fence_proxy_async();
  device::arrive_expect(barrier, kLoad == Load::kFewBytes ? 16 : 64);
  device::bulk_load(stage, reinterpret_cast<const std::byte*>(params.data), 64, barrier);
  if (kLoad != Load::kNoWait)
    while (!device::try_wait(barrier, kLoad == Load::kWrongParity ? 1 : 0)) {
    }
  note(params, device::load(reinterpret_cast<const uint64_t*>(stage)));
  while (kLoad != Load::kFewBytes && !device::try_wait(barrier, 0)) {
  }
}

MOE_SCENARIO(litmus_bulk_load, "a flag, a proxy fence, a bulk load, a wait for its barrier") {
  run_on_two_ranks(run, &load_in_bulk<true, Load::kRight>);
}
MOE_WRONG_SCENARIO(litmus_bulk_load_no_fence, "no proxy fence between the flag and the load") {
  run_on_two_ranks(run, &load_in_bulk<false, Load::kRight>);
}
MOE_WRONG_SCENARIO(litmus_bulk_load_no_init_fence, "the barrier's initialization is not fenced") {
  run_on_two_ranks(run, &load_in_bulk<true, Load::kNoInitFence>);
}
MOE_WRONG_SCENARIO(litmus_bulk_load_no_wait, "what was loaded is read before it is there") {
  run_on_two_ranks(run, &load_in_bulk<true, Load::kNoWait>);
}
MOE_WRONG_SCENARIO(litmus_bulk_load_wrong_parity, "the wait is for the phase before") {
  run_on_two_ranks(run, &load_in_bulk<true, Load::kWrongParity>);
}
MOE_WRONG_SCENARIO(litmus_bulk_load_few_bytes, "fewer bytes are expected than are loaded") {
  run_on_two_ranks(run, &load_in_bulk<true, Load::kFewBytes>);
}

template <int kWords, bool kIsOwn>
void reach_too_far(LitmusParams params) {
  if (device::thread_idx() != 0 || params.rank_idx != 0)
    return;
  device::store((kIsOwn ? params.own : params.data) + kWords, 7);
  note(params, device::load((kIsOwn ? params.own : params.data) + kWords));
}

MOE_SCENARIO(litmus_bounds, "the last word of a region") {
  run_on_two_ranks(run, &reach_too_far<63, true>);
}
MOE_WRONG_SCENARIO(litmus_bounds_behind, "one word behind a region") {
  run_on_two_ranks(run, &reach_too_far<64, true>);
}
MOE_WRONG_SCENARIO(litmus_bounds_heap, "one word behind a peer's region") {
  run_on_two_ranks(run, &reach_too_far<8, false>);
}

void read_unwritten(LitmusParams params) {
  if (device::thread_idx() == 0)
    note(params, device::load(reinterpret_cast<const uint64_t*>(device::shared_memory())));
}
MOE_WRONG_SCENARIO(litmus_unwritten, "shared memory is read that nobody has written") {
  run_on_two_ranks(run, &read_unwritten);
}

/// Three rounds; the writer writes again only once the reader is done with the round before.
template <bool kWaits, bool kCurrentEpoch>
void reuse_by_epochs(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  uint64_t* const done = params.flag + 1;
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    if (params.rank_idx == 0) {
      while (kWaits && device::load_acquire<Scope::kSystem>(done) < epoch - 1)
        device::pause(32);
      device::store(params.data, 7);
      device::store_release<Scope::kSystem>(params.flag, epoch);
    } else {
      while (device::load_acquire<Scope::kSystem>(params.flag) < (kCurrentEpoch ? epoch : 1))
        device::pause(32);
      note(params, device::load(params.data));
      device::store_release<Scope::kSystem>(done, epoch);
    }
  }
}

MOE_SCENARIO(litmus_epochs, "a place written again once its reader is done") {
  run_on_two_ranks(run, &reuse_by_epochs<true, true>);
}
MOE_WRONG_SCENARIO(litmus_epochs_no_wait, "a place written again too early") {
  run_on_two_ranks(run, &reuse_by_epochs<false, true>);
}
MOE_WRONG_SCENARIO(litmus_epochs_stale, "a reader takes the flag of an earlier epoch") {
  run_on_two_ranks(run, &reuse_by_epochs<true, false>);
}

/// Ranks wait for each other.
void wait_in_a_circle(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  await<Scope::kSystem>(params.flag + params.rank_idx, 1);
  device::store_release<Scope::kSystem>(params.flag + (1 - params.rank_idx), 1);
}
MOE_WRONG_SCENARIO(litmus_deadlock, "two ranks each wait for the other's flag") {
  run_on_two_ranks(run, &wait_in_a_circle);
}

template <bool kOrdered>
void count_blocks(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  device::store(params.own + 8 + device::block_idx(), 7);
  const uint64_t before = kOrdered ? device::add_acq_rel<Scope::kDevice>(params.own, uint64_t{1})
                                   : device::add_relaxed<Scope::kDevice>(params.own, uint64_t{1});
  if (before == 2)
    for (int block_idx = 0; block_idx < 3; ++block_idx)
      note(params, device::load(params.own + 8 + block_idx));
}

MOE_SCENARIO(litmus_count, "the last of three blocks reads what the others wrote") {
  run_on_two_ranks(run, &count_blocks<true>, {3, 32, 0, nullptr});
}
MOE_WRONG_SCENARIO(litmus_count_relaxed, "the blocks count themselves without order") {
  run_on_two_ranks(run, &count_blocks<false>, {3, 32, 0, nullptr});
}

void write_from_everywhere(LitmusParams params) {
  if (device::thread_idx() == 0)
    device::store(params.own, 7);
}
MOE_WRONG_SCENARIO(litmus_two_writers, "two blocks write one word") {
  run_on_two_ranks(run, &write_from_everywhere, {2, 32, 0, nullptr});
}

template <bool kConstant>
void write_then_read(LitmusParams params) {
  if (device::thread_idx() != 0)
    return;
  device::store(params.own, 7);
  note(params, kConstant ? device::load_constant(params.own) : device::load(params.own));
}
MOE_SCENARIO(litmus_own_value, "a thread reads what it wrote") {
  run_on_two_ranks(run, &write_then_read<false>);
}
MOE_WRONG_SCENARIO(litmus_constant, "a constant load of what the kernel wrote") {
  run_on_two_ranks(run, &write_then_read<true>);
}

MOE_WRONG_SCENARIO(litmus_signal, "code of the host reads what it likes") {
  run_on_two_ranks(run, &write_then_read<false>);
  std::raise(SIGSEGV);
}

}  // namespace
}  // namespace moe::simt::checker
