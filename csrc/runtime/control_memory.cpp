#include "runtime/control_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/sync.h"
#include "runtime/device_memory.h"
#include "runtime/polling.h"

namespace moe::runtime {

using kernels::Buffer;
using kernels::BufferState;
using kernels::WaitReport;
using kernels::WaitTotals;
using layout::Row;
using layout::Workspace;

int64_t ControlMemory::area_bytes(const ops::EndpointBase& endpoint) {
  return Workspace::bytes(
      endpoint.num_ranks(), endpoint.config().num_experts, endpoint.config().depth);
}

ControlMemory::ControlMemory(const ops::EndpointBase& endpoint,
                             Device& device,
                             const SegmentBases& bases,
                             const Window& area)
    : endpoint_(endpoint),
      device_(device),
      area_offer_(area.offer()),
      taken_waits_ns_(static_cast<size_t>(endpoint.num_ranks())) {
  const int64_t count = endpoint.num_ranks();
  const int num_experts = endpoint.config().num_experts;
  const auto lay = [&](Suballocator suballocator) {
    buffer_.workspaces = suballocator.take<std::byte*>(count);
    buffer_.is_active = suballocator.take<uint8_t>(count);
    buffer_.is_elsewhere = suballocator.take<uint8_t>(count);
    buffer_.expert_rank = suballocator.take<int32_t>(num_experts);
    buffer_.experts_by_rank = suballocator.take<int32_t>(num_experts);
    buffer_.first_of_rank = suballocator.take<int32_t>(count + 1);
    return suballocator.bytes();
  };
  constants_ = device.allocate(lay(Suballocator(nullptr)));
  lay(Suballocator(constants_.get()));
  state_ = device.allocate(sizeof(BufferState));
  report_ = device.allocate_host(sizeof(WaitReport));
  waits_ = device.allocate_host(count * static_cast<int64_t>(sizeof(WaitTotals)));
  rank_values_ = device.allocate(count);
  side_word_ = device.allocate_host(8);
  // Page-locked memory that outlives its copies: who uploads drains the stream.
  staging_ = device.allocate_host(16 * (count + 1) + 8 * num_experts + 64 * 6);
  state_staging_ = device.allocate_host(sizeof(BufferState));

  const group::Group& group = endpoint.group();
  buffer_.rank_idx = endpoint.rank_idx();
  buffer_.num_ranks = endpoint.num_ranks();
  buffer_.num_experts = num_experts;
  buffer_.num_local_experts = static_cast<int32_t>(
      endpoint.placement().local_experts[static_cast<size_t>(endpoint.rank_idx())].size());
  buffer_.depth = endpoint.config().depth;
  buffer_.state = reinterpret_cast<BufferState*>(state_.get());
  buffer_.report = reinterpret_cast<WaitReport*>(report_.get());
  buffer_.waits = reinterpret_cast<WaitTotals*>(waits_.get());
  buffer_.abort_word = reinterpret_cast<const uint32_t*>(
      device.map_host(group.abort_word(), sizeof(uint32_t), group.abort_memory()));
  buffer_.stall_limit_ns = static_cast<uint64_t>(group.stall_timeout_ns());
  buffer_.arrival_limit_ns = static_cast<uint64_t>(group.arrival_timeout_ns());
  buffer_.segment_bases = bases.table();
  buffer_.found_bases = bases.found();
  own_area_ = buffer_.workspace(area.data());

  const auto lay_tables = [&](Suballocator suballocator) {
    tables_.epoch = suballocator.take<uint64_t>(1);
    tables_.may_move = suballocator.take<int32_t>(1);
    tables_.peers = suballocator.take<kernels::Peer>(2 * count);
    tables_.stream_starts = suballocator.take<int64_t>(num_experts + count);
    tables_.num_rows = suballocator.take<int64_t>(2);
    tables_.status = suballocator.take<int32_t>(2);
    return suballocator.bytes();
  };
  tables_memory_ = device.allocate(lay_tables(Suballocator(nullptr)));
  lay_tables(Suballocator(tables_memory_.get()));
}

void ControlMemory::connect(std::vector<std::byte*> areas, std::vector<uint8_t> is_elsewhere) {
  areas_ = std::move(areas);
  is_elsewhere_ = std::move(is_elsewhere);
}

void ControlMemory::upload(Stream& stream) {
  const int64_t count = buffer_.num_ranks;
  const int64_t num_experts = buffer_.num_experts;
  const layout::Placement& placement = endpoint_.placement();
  Suballocator suballocator(staging_.get());
  auto* const bases = suballocator.take<std::byte*>(count);
  auto* const is_active = suballocator.take<uint8_t>(count);
  auto* const is_elsewhere = suballocator.take<uint8_t>(count);
  auto* const expert_rank = suballocator.take<int32_t>(num_experts);
  auto* const experts_by_rank = suballocator.take<int32_t>(num_experts);
  auto* const first_of_rank = suballocator.take<int32_t>(count + 1);
  int32_t num_listed = 0;
  for (int rank_idx = 0; rank_idx < count; ++rank_idx) {
    is_active[rank_idx] = endpoint_.group().is_active(rank_idx) ? 1 : 0;
    first_of_rank[rank_idx] = num_listed;
    for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(rank_idx)])
      experts_by_rank[num_listed++] = expert_idx;
  }
  first_of_rank[count] = num_listed;
  std::copy(areas_.begin(), areas_.end(), bases);
  std::copy(placement.expert_rank.begin(), placement.expert_rank.end(), expert_rank);
  std::copy(is_elsewhere_.begin(), is_elsewhere_.end(), is_elsewhere);
  const auto upload = [&stream](const void* target, const void* source, int64_t bytes) {
    stream.copy(const_cast<void*>(target), source, bytes);
  };
  upload(buffer_.workspaces, bases, 8 * count);
  upload(buffer_.is_active, is_active, count);
  upload(buffer_.is_elsewhere, is_elsewhere, count);
  upload(buffer_.expert_rank, expert_rank, 4 * num_experts);
  upload(buffer_.experts_by_rank, experts_by_rank, 4 * num_experts);
  upload(buffer_.first_of_rank, first_of_rank, 4 * (count + 1));
}

void ControlMemory::restart(Stream& stream, uint64_t next_epoch) {
  std::memset(report_.get(), 0, sizeof(WaitReport));
  upload(stream);
  reinterpret_cast<BufferState*>(state_staging_.get())->epoch = next_epoch - 1;
  stream.copy(state_.get(), state_staging_.get(), sizeof(BufferState));
}

Buffer ControlMemory::buffer() const {
  Buffer buffer = buffer_;
  buffer.abort_generation = endpoint_.group().generation();
  buffer.first_epoch = endpoint_.first_epoch();
  return buffer;
}

ops::WaitStatistics ControlMemory::wait_statistics() const {
  ops::WaitStatistics statistics;
  for (int peer_rank = 0; peer_rank < buffer_.num_ranks; ++peer_rank) {
    const WaitTotals& totals = buffer_.waits[peer_rank];
    statistics.waited_ns.push_back(static_cast<int64_t>(sync::load_relaxed(totals.waited_ns)));
    statistics.num_waits.push_back(static_cast<int64_t>(sync::load_relaxed(totals.num_waits)));
  }
  return statistics;
}

std::vector<int64_t> ControlMemory::take_waited_ns() {
  std::vector<int64_t> waited_ns = wait_statistics().waited_ns;
  for (size_t i = 0; i < waited_ns.size(); ++i)
    waited_ns[i] -= std::exchange(taken_waits_ns_[i], waited_ns[i]);
  return waited_ns;
}

void ControlMemory::copy(void* target, const void* source, int64_t bytes) const {
  const std::lock_guard<std::mutex> lock(side_mutex_);
  copy_alone(target, source, bytes);
}

void ControlMemory::copy_alone(void* target, const void* source, int64_t bytes) const {
  if (!side_stream_) {
    device_.activate();
    side_stream_ = device_.side_stream();
  }
  side_stream_->copy(target, source, bytes);
  await(*side_stream_->record());
}

template <typename Word>
Word ControlMemory::read(const Word& word) const {
  const std::lock_guard<std::mutex> lock(side_mutex_);
  copy_alone(side_word_.get(), &word, sizeof(Word));
  return *reinterpret_cast<const Word*>(side_word_.get());
}

template <typename Word>
void ControlMemory::write(Word& word, Word value) {
  const std::lock_guard<std::mutex> lock(side_mutex_);
  *reinterpret_cast<Word*>(side_word_.get()) = value;
  copy_alone(&word, side_word_.get(), sizeof(Word));
}

bool ControlMemory::has_row(uint64_t epoch, int peer_rank) const {
  return read(own_area_.row(epoch, peer_rank).epoch) >= epoch;
}

bool ControlMemory::is_done(uint64_t epoch, int peer_rank) const {
  return read(own_area_.done(epoch, peer_rank).epoch) >= epoch;
}

bool ControlMemory::lacks(int peer_rank, group::WaitSite* site) const {
  const uint64_t epoch = read(buffer_.state->epoch);
  if (epoch < endpoint_.first_epoch())
    return false;
  const bool has_come = has_row(epoch, peer_rank);
  // A rank that rejected an operation writes nothing else in it.
  const Row& row = own_area_.row(epoch, peer_rank);
  if (has_come && (read(row.status) != static_cast<int32_t>(layout::RowStatus::kOk) ||
                   is_done(epoch, peer_rank)))
    return false;
  site->operation = static_cast<layout::Operation>(
      read(own_area_.row(epoch, buffer_.rank_idx).arguments.operation));
  site->phase = has_come ? layout::Phase::kData : layout::Phase::kRows;
  site->epoch = static_cast<int64_t>(epoch);
  site->buffer_number = endpoint_.buffer_number();
  return true;
}

group::Recoverable::Epochs ControlMemory::epochs() const {
  const uint64_t epoch = read(buffer_.state->epoch);
  // The operation that left last has not completed.
  return {epoch + 1, read(buffer_.state->has_left) == 0 ? epoch : epoch - 1};
}

void ControlMemory::show_phase(layout::Phase phase) {
  write(own_area_.activity().phase, static_cast<int32_t>(phase));
}

void ControlMemory::write_rejected_row(uint64_t epoch, int peer_rank) {
  Row& row = own_area_.row(epoch, peer_rank);
  write(row.status, static_cast<int32_t>(layout::RowStatus::kInvalidArgument));
  write(row.epoch, epoch);
  // An operation further on may wait for its ring entry.
  write(own_area_.done(epoch, peer_rank).epoch, epoch);
}

}  // namespace moe::runtime
