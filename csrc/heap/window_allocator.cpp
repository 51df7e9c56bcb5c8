#include "heap/window_allocator.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <utility>

#include "core/error.h"
#include "core/sync.h"

namespace moe::heap {
namespace {

uint64_t alignment_of(uint64_t rounded) {
  return rounded < WindowAllocator::kPageBytes ? WindowAllocator::kSmallBytes
                                               : WindowAllocator::kPageBytes;
}

}  // namespace

uint64_t WindowAllocator::rounded_bytes(uint64_t bytes) {
  // 4033..4095 round up to a whole page, which is then aligned like one.
  const uint64_t small = round_up(bytes, kSmallBytes);
  return small < kPageBytes ? small : round_up(bytes, kPageBytes);
}

// Sizes in units of 64 bytes: below 8 units a bin per size, above 8 bins per power of two.
int WindowAllocator::bin_of(uint64_t bytes) {
  const uint64_t units = bytes / kSmallBytes;
  if (units < 8)
    return static_cast<int>(units);
  const int power = static_cast<int>(std::bit_width(units)) - 1;
  const int eighth = static_cast<int>((units >> (power - 3)) & 7);
  return std::min((power - 2) * 8 + eighth, kNumBins - 1);
}

bool WindowAllocator::fits(const Block& block, uint64_t rounded) {
  const uint64_t start = round_up(block.offset, alignment_of(rounded));
  const uint64_t lead_bytes = start - block.offset;
  return lead_bytes <= block.bytes && rounded <= block.bytes - lead_bytes;
}

/// Largest window that the block can hold: whole aligned pages, or small when it holds none.
uint64_t WindowAllocator::usable_bytes(const Block& block) {
  const uint64_t start = round_up(block.offset, kPageBytes);
  const uint64_t end = (block.offset + block.bytes) / kPageBytes * kPageBytes;
  if (end > start)
    return end - start;
  return std::min(block.bytes, kPageBytes - kSmallBytes);
}

void WindowAllocator::add_nodes(NodeChunk chunk) {
  chunks_.push_back(std::move(chunk));
  for (uint64_t i = 0; i < kNodesPerChunk; ++i)
    drop_node(&chunks_.back()[i]);
}

WindowAllocator::Block* WindowAllocator::take_node() {
  if (spare_nodes_ == nullptr)
    add_nodes(std::make_unique<Block[]>(kNodesPerChunk));
  Block* node = std::exchange(spare_nodes_, spare_nodes_->next);
  --num_spare_nodes_;
  *node = Block{};
  return node;
}

void WindowAllocator::drop_node(Block* block) noexcept {
  block->next = std::exchange(spare_nodes_, block);
  ++num_spare_nodes_;
}

void WindowAllocator::add_segment(uint32_t segment_idx, uint64_t bytes, uint64_t offset) {
  if (lowest_.size() <= segment_idx) {
    lowest_.resize(segment_idx + 1, nullptr);
    highest_.resize(segment_idx + 1, nullptr);
  }
  MOE_CHECK(lowest_[segment_idx] == nullptr,
            "segment ",
            segment_idx,
            " is added twice: it has ",
            lowest_[segment_idx]->bytes,
            " bytes in its first block, now ",
            bytes);
  Block* block = take_node();
  block->segment_idx = segment_idx;
  block->offset = offset;
  block->bytes = bytes;
  lowest_[segment_idx] = highest_[segment_idx] = block;
  counters_.free_bytes += bytes;
  insert_free(block);
}

void WindowAllocator::extend(uint32_t segment_idx, uint64_t bytes, End end) {
  Block* block = take_node();
  block->segment_idx = segment_idx;
  block->bytes = bytes;
  if (end == End::kUpper) {
    Block* const highest = highest_[segment_idx];
    block->offset = highest->offset + highest->bytes;
    set_upper(block, nullptr);
    set_upper(highest, block);
  } else {
    block->offset = lowest_[segment_idx]->offset - bytes;
    set_upper(block, lowest_[segment_idx]);
    lowest_[segment_idx] = block;
  }
  counters_.free_bytes += bytes;
  merge_and_insert(block);
}

uint64_t WindowAllocator::missing_bytes(uint32_t segment_idx, uint64_t bytes, End end) const {
  const uint64_t rounded = rounded_bytes(bytes);
  const Block& last = *(end == End::kUpper ? highest_ : lowest_)[segment_idx];
  uint64_t usable = last.state == BlockState::kFree ? last.bytes : 0;
  // Segments begin, and are extended, by whole pages.
  if (end == End::kUpper)
    usable -= std::min(usable, round_up(last.offset, alignment_of(rounded)) - last.offset);
  return rounded - std::min(rounded, usable);
}

void WindowAllocator::insert_free(Block* block) noexcept {
  const int bin_idx = bin_of(block->bytes);
  block->state = BlockState::kFree;
  block->previous = nullptr;
  block->next = bins_[bin_idx];
  if (block->next != nullptr)
    block->next->previous = block;
  bins_[bin_idx] = block;
  occupied_[bin_idx / 64] |= uint64_t{1} << (bin_idx % 64);
}

void WindowAllocator::remove_free(Block* block) noexcept {
  const int bin_idx = bin_of(block->bytes);
  if (block->next != nullptr)
    block->next->previous = block->previous;
  if (block->previous != nullptr)
    block->previous->next = block->next;
  else
    bins_[bin_idx] = block->next;
  if (bins_[bin_idx] == nullptr)
    occupied_[bin_idx / 64] &= ~(uint64_t{1} << (bin_idx % 64));
}

/// First bin from @p bin_idx on that has blocks, kNumBins if none.
int WindowAllocator::next_bin(int bin_idx) const {
  if (bin_idx >= kNumBins)
    return kNumBins;
  size_t word_idx = static_cast<size_t>(bin_idx) / 64;
  uint64_t word = occupied_[word_idx] & (~uint64_t{0} << (bin_idx % 64));
  while (word == 0) {
    if (++word_idx == occupied_.size())
      return kNumBins;
    word = occupied_[word_idx];
  }
  return static_cast<int>(word_idx * 64) + std::countr_zero(word);
}

/// Last bin up to @p bin_idx that has blocks, -1 if none.
int WindowAllocator::previous_bin(int bin_idx) const {
  if (bin_idx < 0)
    return -1;
  size_t word_idx = static_cast<size_t>(bin_idx) / 64;
  uint64_t word = occupied_[word_idx] & (~uint64_t{0} >> (63 - bin_idx % 64));
  while (word == 0) {
    if (word_idx-- == 0)
      return -1;
    word = occupied_[word_idx];
  }
  return static_cast<int>(word_idx * 64) + 63 - std::countl_zero(word);
}

WindowAllocator::Block* WindowAllocator::find_fit(uint64_t rounded) const {
  for (int bin_idx = next_bin(bin_of(rounded)); bin_idx < kNumBins;
       bin_idx = next_bin(bin_idx + 1)) {
    for (Block* block = bins_[bin_idx]; block != nullptr; block = block->next)
      if (fits(*block, rounded))
        return block;
  }
  return nullptr;
}

WindowAllocator::Block* WindowAllocator::largest_block() const {
  Block* largest = nullptr;
  for (int bin_idx = previous_bin(kNumBins - 1); bin_idx >= 0;
       bin_idx = previous_bin(bin_idx - 1)) {
    // Alignment can make a block of a lower bin the better one, but not below its own bin.
    if (largest != nullptr && bin_of(usable_bytes(*largest)) > bin_idx)
      break;
    for (Block* block = bins_[bin_idx]; block != nullptr; block = block->next)
      if (largest == nullptr || usable_bytes(*block) > usable_bytes(*largest))
        largest = block;
  }
  return largest;
}

uint64_t WindowAllocator::largest_free_bytes() const {
  const Block* block = largest_block();
  return block == nullptr ? 0 : usable_bytes(*block);
}

/// @param upper  Null where @p block is the highest of its segment.
void WindowAllocator::set_upper(Block* block, Block* upper) noexcept {
  block->upper = upper;
  (upper != nullptr ? upper->lower : highest_[block->segment_idx]) = block;
}

/// Cuts a block in two; @return the upper part, in no list and in the state of the lower.
WindowAllocator::Block* WindowAllocator::split(Block* block, uint64_t lower_bytes) {
  Block* upper = take_node();
  upper->segment_idx = block->segment_idx;
  upper->offset = block->offset + lower_bytes;
  upper->bytes = block->bytes - lower_bytes;
  upper->state = block->state;
  upper->lower = block;
  set_upper(upper, block->upper);
  block->upper = upper;
  block->bytes = lower_bytes;
  return upper;
}

WindowAllocator::Block* WindowAllocator::take(Block* block, uint64_t rounded) {
  sync::note_exclusive(this);
  remove_free(block);
  const uint64_t lead_bytes = round_up(block->offset, alignment_of(rounded)) - block->offset;
  if (lead_bytes > 0) {
    Block* aligned = split(block, lead_bytes);
    insert_free(block);
    block = aligned;
  }
  if (block->bytes > rounded)
    insert_free(split(block, rounded));
  block->state = BlockState::kLive;
  block->quarantine_round = 0;
  counters_.free_bytes -= rounded;
  counters_.live_bytes += rounded;
  counters_.peak_live_bytes = std::max(counters_.peak_live_bytes, counters_.live_bytes);
  ++counters_.num_live;
  ++counters_.num_allocations;
  return block;
}

WindowAllocator::Block* WindowAllocator::allocate(uint64_t bytes) {
  const uint64_t rounded = rounded_bytes(bytes);
  Block* block = find_fit(rounded);
  return block == nullptr ? nullptr : take(block, rounded);
}

WindowAllocator::Block* WindowAllocator::allocate_largest(uint64_t most_bytes) {
  if (most_bytes == 0)
    return nullptr;
  if (Block* block = allocate(most_bytes))
    return block;
  Block* block = largest_block();
  return block == nullptr ? nullptr : take(block, usable_bytes(*block));
}

void WindowAllocator::merge_and_insert(Block* block) noexcept {
  Block* lower = block->lower;
  if (lower != nullptr && lower->state == BlockState::kFree) {
    remove_free(lower);
    lower->bytes += block->bytes;
    set_upper(lower, block->upper);
    drop_node(block);
    block = lower;
  }
  Block* upper = block->upper;
  if (upper != nullptr && upper->state == BlockState::kFree) {
    remove_free(upper);
    block->bytes += upper->bytes;
    set_upper(block, upper->upper);
    drop_node(upper);
  }
  insert_free(block);
}

void WindowAllocator::free(Block* block) noexcept {
  assert(block->state == BlockState::kLive);
  counters_.live_bytes -= block->bytes;
  --counters_.num_live;
  sync::note_exclusive(this);
  if (block->quarantine_round == quarantine_round_) {
    counters_.quarantined_bytes += block->bytes;
    block->state = BlockState::kQuarantined;
    block->next = std::exchange(quarantined_, block);
    return;
  }
  counters_.free_bytes += block->bytes;
  merge_and_insert(block);
}

void WindowAllocator::shrink(Block* block, uint64_t bytes) {
  const uint64_t kept_bytes = std::max(rounded_bytes(bytes), kSmallBytes);
  if (kept_bytes >= block->bytes)
    return;
  Block* tail = split(block, kept_bytes);
  // The tail counts as a window for the moment it takes to free it; a tail that peers may still
  // write to stays aside like the rest.
  tail->quarantine_round = block->quarantine_round;
  ++counters_.num_live;
  free(tail);
}

void WindowAllocator::end_quarantine() noexcept {
  ++quarantine_round_;
  Block* block = std::exchange(quarantined_, nullptr);
  while (block != nullptr) {
    Block* next = block->next;
    counters_.quarantined_bytes -= block->bytes;
    counters_.free_bytes += block->bytes;
    merge_and_insert(block);
    block = next;
  }
}

std::vector<WindowAllocator::Block*> WindowAllocator::take_all_free() {
  std::vector<Block*> taken;
  for (int bin_idx = next_bin(0); bin_idx < kNumBins; bin_idx = next_bin(bin_idx + 1))
    for (Block* block = bins_[bin_idx]; block != nullptr; block = block->next)
      taken.push_back(block);
  for (Block* block : taken) {
    remove_free(block);
    block->state = BlockState::kHeld;
    counters_.free_bytes -= block->bytes;
  }
  return taken;
}

void WindowAllocator::put_back(Block* block) noexcept {
  counters_.free_bytes += block->bytes;
  merge_and_insert(block);
}

std::vector<const WindowAllocator::Block*> WindowAllocator::blocks(uint32_t segment_idx) const {
  std::vector<const Block*> found;
  if (segment_idx < lowest_.size())
    for (const Block* block = lowest_[segment_idx]; block != nullptr; block = block->upper)
      found.push_back(block);
  return found;
}

}  // namespace moe::heap
