// Operations whose caller is a stream: ranks that are threads, each with an emulated device of its
// own. Windows belong to the heap of the CPU backend, which hands them out as soon as they are
// given back: what is given back too early shows.
//
// `stream_callers` prints "ok" or what was found; `stream_callers NAME` has that fault.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "runtime/device_dispatch.h"
#include "runtime/device_endpoint.h"
#include "simt/simt_device.h"
#include "thread_rank.h"

namespace moe::simt {

static std::string g_fault;

bool is_fault_on(const char* name) {
  return g_fault == name;
}

}  // namespace moe::simt

namespace {

using namespace moe;

constexpr int kNumExperts = 2;
constexpr int64_t kNumTokens = 4;
constexpr int64_t kHidden = 32;  // float32

void await(const runtime::Stream& stream) {
  while (!stream.is_idle())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

/// One buffer of a rank, and inputs that every rank knows: row t of rank r is full of 10 r + t, and
/// every token goes to both experts.
struct Caller {
  Caller(int rank_idx, group::ThreadRank& rank)
      : rank_idx(rank_idx), num_ranks(rank.group->num_ranks()) {
    runtime::DeviceEndpointConfig config;
    config.common.num_experts = kNumExperts;
    config.common.expert_rank = {0, 1};
    config.common.depth = 2;
    endpoint = runtime::DeviceEndpoint::create(
        std::shared_ptr<group::Group>(std::shared_ptr<void>(), rank.group.get()),
        rank.heap,
        std::make_shared<simt::SimtDevice>(rank_idx, simt::Caller::kStreams),
        std::move(config),
        {});
    for (int64_t token_idx = 0; token_idx < kNumTokens; ++token_idx) {
      x.insert(x.end(), kHidden, static_cast<float>(10 * rank_idx + token_idx));
      topk_idx.insert(topk_idx.end(), {0, 1});
    }
  }

  ops::DispatchOutcome dispatch() {
    ops::DispatchParams params;
    params.x = reinterpret_cast<const std::byte*>(x.data());
    params.topk_idx = topk_idx.data();
    params.num_tokens = kNumTokens;
    params.num_topk = 2;
    params.source_row_bytes = params.row_bytes = kHidden * 4;
    params.dtype = 2 << 8 | 32;
    params.copy_out = ops::CopyOut::kNever;
    params.is_async = true;
    return runtime::dispatch(*endpoint, params, {});
  }

  /// Joins and looks at every row.
  void check(const ops::DispatchOutcome& outcome) const {
    outcome.end->join({});
    await(*endpoint->order().caller());
    const int64_t num_rows = rank_idx < kNumExperts ? num_ranks * kNumTokens : 0;
    for (int64_t row_idx = 0; row_idx < num_rows; ++row_idx) {
      float value = 0.0f;
      std::memcpy(&value, outcome.rows + row_idx * kHidden * 4, sizeof(value));
      const auto wanted = static_cast<float>(10 * (row_idx / kNumTokens) + row_idx % kNumTokens);
      if (value != wanted)
        group::fail(concat("row ", row_idx, " of rank ", rank_idx, " is ", value));
    }
  }

  /// Returns whether some window that the heap hands out now shares bytes with that of @p rows.
  bool is_handed_out(group::Group& group, const std::byte* rows) const {
    const auto bytes = static_cast<uint64_t>(num_ranks * kNumTokens * kHidden * 4);
    std::vector<std::shared_ptr<Window>> windows;
    for (int i = 0; i < 16; ++i) {
      windows.push_back(group.memory().allocate(bytes));
      const std::byte* const begin = windows.back()->data();
      if (begin < rows + bytes && rows < begin + windows.back()->bytes())
        return true;
    }
    return false;
  }

  int rank_idx;
  int num_ranks;
  std::shared_ptr<runtime::DeviceEndpoint> endpoint;
  std::vector<float> x;
  std::vector<int64_t> topk_idx;
};

/// Memory that peers may write to goes to nobody else before the next operation, also where the
/// result is dropped once its receive has been started.
/// @param starts  whether that receive is started by whoever asks for the end; else by the result's
///   end
void abort_while_receiving(bool starts) {
  std::latch all_have_sent(2);
  std::latch all_have_looked(2);
  group::run_group(2, [&](int rank_idx, group::ThreadRank& rank) {
    Caller caller(rank_idx, rank);
    caller.check(caller.dispatch());
    ops::DispatchOutcome outcome = caller.dispatch();
    all_have_sent.arrive_and_wait();
    if (rank_idx == 1)
      rank.group->abort(layout::AbortCause::kPeerFailed, group::WaitSite{}, {1}, "gave up");
    while (!rank.group->is_aborted())
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    const std::byte* const rows = outcome.rows;
    if (starts)
      outcome.end->join({});
    outcome = ops::DispatchOutcome{};
    await(*caller.endpoint->order().caller());
    if (caller.is_handed_out(*rank.group, rows))
      group::fail(concat("rank ", rank_idx, ": a window that a peer may write to is handed out"));
    all_have_looked.arrive_and_wait();
    rank.group->recover({});
    caller.check(caller.dispatch());
    caller.check(caller.dispatch());
    if (!caller.is_handed_out(*rank.group, rows))
      group::fail(concat("rank ", rank_idx, ": a window never comes back"));
    caller.endpoint->destroy({});
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1)
    simt::g_fault = argv[1];
  abort_while_receiving(true);
  abort_while_receiving(false);
  std::puts("ok");
}
