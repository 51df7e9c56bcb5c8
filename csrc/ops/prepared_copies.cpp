#include "ops/prepared_copies.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

#include "core/error.h"
#include "core/sync.h"

namespace moe::ops {

namespace {

using layout::ReceiveEntry;
using layout::ReceiveTable;

/// Sorts items by peer, then task id, and finds where the share of every peer starts.
std::vector<size_t> sort_by_peer(std::vector<CopyItem>* items, int num_ranks) {
  std::vector<uint32_t> order(items->size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t left, uint32_t right) {
    const CopyItem& a = (*items)[left];
    const CopyItem& b = (*items)[right];
    return a.peer_rank != b.peer_rank ? a.peer_rank < b.peer_rank : a.task_id < b.task_id;
  });
  std::vector<CopyItem> sorted;
  sorted.reserve(items->size());
  for (const uint32_t idx : order)
    sorted.push_back((*items)[idx]);
  *items = std::move(sorted);
  std::vector<size_t> first(static_cast<size_t>(num_ranks) + 1);
  for (const CopyItem& item : *items)
    ++first[static_cast<size_t>(item.peer_rank) + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  return first;
}

}  // namespace

PreparedCopies::PreparedCopies(std::vector<CopyItem> sends,
                               std::vector<CopyItem> receives,
                               int rank_idx,
                               int num_ranks,
                               std::string problem,
                               std::shared_ptr<void> owner)
    : num_ranks_(num_ranks), problem_(std::move(problem)), owner_(std::move(owner)) {
  find_problem("send", sends);
  find_problem("receive", receives);
  if (!problem_.empty())
    return;
  sends_ = std::move(sends);
  receives_ = std::move(receives);
  first_send_ = sort_by_peer(&sends_, num_ranks);
  first_receive_ = sort_by_peer(&receives_, num_ranks);
  const auto find_twice = [&](const char* what, const std::vector<CopyItem>& items) {
    for (size_t i = 1; i < items.size() && problem_.empty(); ++i)
      if (items[i].task_id == items[i - 1].task_id && items[i].peer_rank == items[i - 1].peer_rank)
        problem_ = concat("task ",
                          items[i].task_id,
                          " is in the ",
                          what,
                          "s of rank ",
                          rank_idx,
                          " twice for rank ",
                          items[i].peer_rank);
  };
  find_twice("send", sends_);
  find_twice("receive", receives_);
  find_overlap(receives_);
  blocks_.resize(sends_.size());
  hashed_as_.resize(sends_.size());
  std::iota(hashed_as_.begin(), hashed_as_.end(), 0u);
  for (uint32_t i = 0; i < sends_.size(); ++i)
    if (sends_[i].shape.bytes > 0)
      by_address_.push_back(i);
  std::sort(by_address_.begin(), by_address_.end(), [&](uint32_t left, uint32_t right) {
    const auto key = [&](uint32_t idx) {
      const CopyItem& send = sends_[idx];
      return std::make_tuple(send.data, send.shape.bytes, send.peer_rank);
    };
    return key(left) < key(right);
  });
}

void PreparedCopies::find_problem(const char* what, const std::vector<CopyItem>& items) {
  for (const CopyItem& item : items) {
    if (!problem_.empty())
      return;
    if (item.peer_rank < 0 || item.peer_rank >= num_ranks_)
      problem_ = concat("task ",
                        item.task_id,
                        ": the ",
                        what,
                        " names rank ",
                        item.peer_rank,
                        ", ranks are 0 to ",
                        num_ranks_ - 1);
    else if (what[0] == 'r' && item.shape.may_overlap())
      problem_ = concat("task ",
                        item.task_id,
                        ": the destination shares bytes with itself (",
                        item.shape.bytes,
                        " bytes lie in ",
                        item.shape.span(),
                        ")");
  }
}

/// Destinations of adjacent bytes must lie apart. Interleaved ones are the plan's to check.
void PreparedCopies::find_overlap(const std::vector<CopyItem>& receives) {
  std::vector<const CopyItem*> sorted;
  for (const CopyItem& item : receives)
    if (item.shape.bytes > 0 && item.shape.is_contiguous())
      sorted.push_back(&item);
  std::sort(sorted.begin(), sorted.end(), [](const CopyItem* left, const CopyItem* right) {
    return left->data < right->data;
  });
  for (size_t i = 1; i < sorted.size() && problem_.empty(); ++i) {
    const CopyItem& lower = *sorted[i - 1];
    const CopyItem& upper = *sorted[i];
    if (lower.data + lower.shape.bytes > upper.data)
      problem_ = concat(
          "the destinations of task ",
          lower.task_id,
          " from rank ",
          lower.peer_rank,
          " and task ",
          upper.task_id,
          " from rank ",
          upper.peer_rank,
          " share ",
          std::min(lower.data + lower.shape.bytes, upper.data + upper.shape.bytes) - upper.data,
          " bytes");
  }
}

void PreparedCopies::make_table(SymmetricMemory& memory, uint64_t number) {
  int64_t num_dims = 0;
  for (const CopyItem& item : receives_)
    num_dims += item.shape.num_dims;
  const auto num_entries = static_cast<int64_t>(receives_.size());
  auto window = memory.allocate(static_cast<uint64_t>(ReceiveTable::bytes(num_entries, num_dims)));
  const ReceiveTable table(window->data());
  table.set_counts(num_entries, num_dims);
  shared_pages_.clear();
  written_.clear();
  num_shared_ = memory.num_shared();
  int64_t first_dim = 0;
  for (size_t i = 0; i < receives_.size(); ++i) {
    const CopyItem& item = receives_[i];
    ReceiveEntry entry{};
    entry.task_id = item.task_id;
    entry.bytes = item.shape.bytes;
    std::memcpy(entry.dtype, item.dtype, sizeof(entry.dtype));
    entry.run_bytes = item.shape.run_bytes;
    entry.first_dim = first_dim;
    entry.num_dims = item.shape.num_dims;
    const auto span = static_cast<uint64_t>(item.shape.span());
    std::byte* written = item.data;
    if (const auto pages = span > 0 ? memory.find_shared(item.data, span) : nullptr)
      if (std::byte* const place = pages->in_heap(item.data)) {
        written = place;
        shared_pages_.push_back(pages);
      }
    written_.push_back(written);
    entry.is_in_heap = span > 0 && memory.find(written, span, &entry.place) ? 1 : 0;
    for (int dim = 0; dim < item.shape.num_dims; ++dim)
      table.dims()[first_dim++] = {item.shape.sizes[dim], item.shape.strides[dim]};
    table.entries()[i] = entry;
  }
  std::sort(shared_pages_.begin(), shared_pages_.end());
  shared_pages_.erase(std::unique(shared_pages_.begin(), shared_pages_.end()), shared_pages_.end());
  sync::note_write(window->data(), window->bytes());
  table_window_ = std::move(window);
  number_ = number;
}

bool PreparedCopies::begin_writes() {
  for (size_t i = 0; i < shared_pages_.size(); ++i) {
    if (shared_pages_[i]->begin_writes())
      continue;
    while (i-- > 0)
      shared_pages_[i]->end_writes(false);
    return false;
  }
  return true;
}

void PreparedCopies::end_writes(bool is_failed) {
  for (const auto& pages : shared_pages_)
    pages->end_writes(is_failed);
}

void PreparedCopies::begin_checksums() {
  has_checksums_ = false;
  std::fill(blocks_.begin(), blocks_.end(), 0);
}

std::optional<uint64_t> PreparedCopies::checksum_of(const CopyItem& item) const {
  if (!has_checksums_ || item.peer_rank < 0 || item.peer_rank >= num_ranks_)
    return std::nullopt;
  const auto first = sends_.begin() + static_cast<ptrdiff_t>(first_send(item.peer_rank));
  const auto end = sends_.begin() + static_cast<ptrdiff_t>(first_send(item.peer_rank + 1));
  const auto found =
      std::lower_bound(first, end, item.task_id, [](const CopyItem& send, int64_t task_id) {
        return send.task_id < task_id;
      });
  if (found == end || found->task_id != item.task_id || found->data != item.data ||
      !(found->shape == item.shape))
    return std::nullopt;
  const uint32_t hashed_as = hashed_as_[static_cast<size_t>(found - sends_.begin())];
  return cpu::finish_checksum(blocks_[hashed_as], item.shape.bytes);
}

std::shared_ptr<Window> PreparedCopies::take_table() {
  route_ = Route{};
  return std::move(table_window_);
}

}  // namespace moe::ops
