#include "schedules/host_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace moe::simt::checker {

using sync::checked::Order;

namespace {

constexpr int64_t kPageBytes = 4096;
// How often a load that may see an old value does.
constexpr uint32_t kStaleOf = 3;

void put(void* word, uint64_t value, size_t bytes) {
  std::memcpy(word, &value, bytes);  // little-endian, as all of the heap
}

uint64_t cut(uint64_t value, size_t bytes) {
  return bytes == 8 ? value : value & 0xFFFFFFFFu;
}

}  // namespace

HostMemory::HostMemory()
    : storage_(std::make_unique<std::byte[]>(static_cast<size_t>(kArenaBytes + kPageBytes))),
      pages_(static_cast<size_t>(kNumPages)),
      is_page_used_(static_cast<size_t>(kNumPages)) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.get());
  arena_ = storage_.get() + (kPageBytes - address % kPageBytes) % kPageBytes;
}

void HostMemory::reset(Random* random, Findings* findings) {
  for (const int64_t page : used_pages_) {
    *pages_[static_cast<size_t>(page)] = Page{};
    is_page_used_[static_cast<size_t>(page)] = 0;
  }
  used_pages_.clear();
  words_.clear();
  changes_.clear();
  threads_.clear();
  fences_ = Clock();
  random_ = random;
  findings_ = findings;
}

int HostMemory::add_thread(std::string name) {
  if (threads_.size() == kMaxThreads)
    throw std::length_error("more host threads than the checker has room for");
  threads_.emplace_back();
  threads_.back().name = std::move(name);
  return static_cast<int>(threads_.size()) - 1;
}

std::string HostMemory::describe(int64_t cell_idx) const {
  const int64_t place = cell_idx * kCellBytes;
  return concat("heap of rank ", place / part_bytes_, " + ", place % part_bytes_);
}

std::string HostMemory::name_of(int slot) const {
  if (slot < 0)
    return "nobody";
  const std::string& name = threads_[static_cast<size_t>(slot / 2)].name;
  return slot % 2 == 0 ? name : name + " past the caches";
}

void HostMemory::found(Kind kind, int thread_idx, const std::string& text) {
  findings_->add(kind, concat(text, ", by ", thread(thread_idx).name));
}

bool HostMemory::knows(const Thread& thread, int thread_idx, int slot, uint32_t step) const {
  return slot / 2 == thread_idx || thread.known.at(static_cast<uint32_t>(slot)) >= step;
}

HostMemory::Cell& HostMemory::cell(int64_t idx) {
  const int64_t page = idx / kPageCells;
  const auto at = static_cast<size_t>(page);
  if (is_page_used_[at] == 0) {
    if (pages_[at] == nullptr)
      pages_[at] = std::make_unique<Page>();
    is_page_used_[at] = 1;
    used_pages_.push_back(page);
  }
  return (*pages_[at])[static_cast<size_t>(idx % kPageCells)];
}

template <typename Body>
void HostMemory::for_cells(const void* begin, size_t bytes, Body&& body) {
  if (bytes == 0 || !is_shared(begin))
    return;
  const int64_t first = static_cast<const std::byte*>(begin) - arena_;
  const int64_t last = std::min(first + static_cast<int64_t>(bytes), kArenaBytes) - 1;
  for (int64_t idx = first / kCellBytes; idx <= last / kCellBytes; ++idx)
    body(cell(idx), idx);
}

/// Reports what is wrong with an access.
void HostMemory::check(int thread_idx, Cell& cell, int64_t idx, bool is_write, bool is_atomic) {
  const char* const what =
      is_write ? (is_atomic ? "store to" : "write to") : (is_atomic ? "load of" : "read of");
  const Thread& self = thread(thread_idx);
  if (!cell.is_live)
    return found(Kind::kBounds,
                 thread_idx,
                 concat(what,
                        ' ',
                        describe(idx),
                        ", which belongs to no window since ",
                        name_of(cell.write_slot)));
  if (!is_write && !cell.is_written)
    return found(Kind::kUninitialised,
                 thread_idx,
                 concat(what, ' ', describe(idx), ", which nobody has written"));
  const auto race = [&](int slot, const char* other) {
    found(Kind::kRace,
          thread_idx,
          concat("nothing orders the ",
                 what,
                 ' ',
                 describe(idx),
                 " after the ",
                 other,
                 " by ",
                 name_of(slot)));
  };
  if (cell.write_slot != kNobody && !(is_atomic && cell.is_atomic_write) &&
      !knows(self, thread_idx, cell.write_slot, cell.write_step))
    return race(cell.write_slot, cell.is_atomic_write ? "store" : "write");
  if (!is_write)
    return;
  for (int other = 0; other < static_cast<int>(threads_.size()); ++other) {
    const auto at = static_cast<size_t>(other);
    if (!knows(self, thread_idx, slot_of(other), cell.reads[at]))
      return race(slot_of(other), "read");
    if (!self.has_failed && !knows(self, thread_idx, slot_of(other), cell.pulls[at]))
      return race(slot_of(other), "pull");
    if (!is_atomic && !knows(self, thread_idx, slot_of(other), cell.atomics[at]))
      return race(slot_of(other), "access to a flag");
  }
}

void HostMemory::read(int thread_idx, const void* from, size_t bytes) {
  for_cells(from, bytes, [&](Cell& cell, int64_t idx) {
    if (!findings_->empty())
      return;
    check(thread_idx, cell, idx, false, false);
    cell.reads[static_cast<size_t>(thread_idx)] = thread(thread_idx).step;
  });
}

void HostMemory::read_loosely(int thread_idx, const void* from, size_t bytes) {
  for_cells(from, bytes, [&](Cell& cell, int64_t idx) {
    if (!findings_->empty() || (cell.is_live && !cell.is_written))
      return;
    check(thread_idx, cell, idx, false, false);
    cell.reads[static_cast<size_t>(thread_idx)] = thread(thread_idx).step;
  });
}

void HostMemory::pull(int thread_idx, const void* from, size_t bytes) {
  auto& pulls = thread(thread_idx).pulls;
  for_cells(from, bytes, [&](Cell& cell, int64_t idx) {
    pulls.push_back({idx, cell.write_slot, cell.write_step});
  });
}

/// Problem with what the thread has pulled so far.
void HostMemory::examine_pulls(int thread_idx) {
  Thread& self = thread(thread_idx);
  Findings doubts;
  Findings* const findings = std::exchange(findings_, &doubts);
  for (const Pull& pull : self.pulls) {
    Cell& pulled = cell(pull.cell_idx);
    check(thread_idx, pulled, pull.cell_idx, false, false);
    if (pulled.write_slot != pull.write_slot || pulled.write_step != pull.write_step)
      found(Kind::kRace,
            thread_idx,
            concat(describe(pull.cell_idx),
                   " was pulled, then written by ",
                   name_of(pulled.write_slot),
                   ", and counts all the same"));
    if (!doubts.empty())
      break;
  }
  findings_ = findings;
  if (!doubts.empty())
    self.doubts = doubts.kept();
}

void HostMemory::confirm_pulls(int thread_idx) {
  Thread& self = thread(thread_idx);
  for (const Finding& doubt : std::exchange(self.doubts, {}))
    findings_->add(doubt.kind, doubt.text);
  for (const Pull& pull : self.pulls)
    cell(pull.cell_idx).pulls[static_cast<size_t>(thread_idx)] = self.step;
  self.pulls.clear();
  self.has_failed = false;
}

void HostMemory::drop_pulls(int thread_idx) {
  thread(thread_idx).pulls.clear();
  thread(thread_idx).doubts.clear();
  thread(thread_idx).has_failed = true;
}

void HostMemory::write(int thread_idx, const void* to, size_t bytes, Manner manner) {
  const bool is_streaming = manner == Manner::kStreaming;
  for_cells(to, bytes, [&](Cell& cell, int64_t idx) {
    if (!findings_->empty())
      return;
    check(thread_idx, cell, idx, true, false);
    if (cell.is_word) {
      cell.is_word = false;
      words_.erase(arena_ + idx * kCellBytes);
    }
    cell.is_written = true;
    cell.is_atomic_write = false;
    cell.write_slot =
        static_cast<int16_t>(is_streaming ? streaming_slot_of(thread_idx) : slot_of(thread_idx));
    cell.write_step = is_streaming ? thread(thread_idx).streaming_step : thread(thread_idx).step;
  });
}

void HostMemory::store_fence(int thread_idx) {
  Thread& self = thread(thread_idx);
  const auto slot = static_cast<uint32_t>(streaming_slot_of(thread_idx));
  self.known.raise(slot, self.streaming_step);
  self.visible.raise(slot, self.streaming_step++);
}

void HostMemory::note_exclusive(int thread_idx, const void* object) {
  const auto [place, is_first] = changes_.try_emplace(object, -1, 0u);
  auto& [last_thread, last_step] = place->second;
  if (!is_first && !knows(thread(thread_idx), thread_idx, slot_of(last_thread), last_step))
    found(Kind::kRace,
          thread_idx,
          concat("nothing orders a change of what one thread may change at a time after one by ",
                 name_of(slot_of(last_thread))));
  last_thread = thread_idx;
  last_step = thread(thread_idx).step;
}

void HostMemory::allocate(int thread_idx, const void* begin, size_t bytes) {
  for_cells(begin, bytes, [&](Cell& cell, int64_t idx) {
    if (cell.is_live && findings_->empty())
      found(Kind::kBounds, thread_idx, concat(describe(idx), " is handed out twice"));
    if (cell.is_word)
      words_.erase(arena_ + idx * kCellBytes);
    cell = Cell{};
    cell.is_live = true;
  });
}

void HostMemory::free(int thread_idx, const void* begin, size_t bytes) {
  write(thread_idx, begin, bytes, Manner::kPlain);
  for_cells(begin, bytes, [](Cell& cell, int64_t) { cell.is_live = false; });
}

Clock HostMemory::close(int thread_idx) {
  Thread& self = thread(thread_idx);
  const auto slot = static_cast<uint32_t>(slot_of(thread_idx));
  self.known.raise(slot, self.step);
  self.visible.raise(slot, self.step++);
  return self.known;
}

void HostMemory::join(int thread_idx, const Clock& clock) {
  thread(thread_idx).known.join(clock);
  thread(thread_idx).visible.join(clock);
}

uint64_t HostMemory::latest(const void* word, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, word, bytes);
  return value;
}

HostMemory::Word& HostMemory::word_at(int thread_idx,
                                      const void* address,
                                      size_t bytes,
                                      bool is_write) {
  for_cells(address, bytes, [&](Cell& cell, int64_t idx) {
    if (findings_->empty())
      check(thread_idx, cell, idx, is_write, true);
    cell.is_word = cell.is_word || arena_ + idx * kCellBytes == address;
    cell.atomics[static_cast<size_t>(thread_idx)] = thread(thread_idx).step;
    if (is_write) {
      cell.is_written = true;
      cell.is_atomic_write = true;
      cell.write_slot = static_cast<int16_t>(slot_of(thread_idx));
      cell.write_step = thread(thread_idx).step;
    }
  });
  Word& word = words_[address];
  if (word.stores.empty())
    word.stores.push_back({latest(address, bytes), kNobody, 0, {}});
  return word;
}

/// Index of the oldest store that the thread may still see.
uint64_t HostMemory::floor(const Thread& thread, int thread_idx, const Word& word) const {
  uint64_t lowest = word.first_idx;
  for (size_t i = 0; i < word.stores.size(); ++i) {
    const Store& store = word.stores[i];
    if (store.slot == kNobody || store.slot / 2 == thread_idx ||
        thread.visible.at(static_cast<uint32_t>(store.slot)) >= store.step)
      lowest = word.first_idx + i;
  }
  for (const Seen& seen : word.seen)
    if (seen.thread == thread_idx ||
        thread.visible.at(static_cast<uint32_t>(slot_of(seen.thread))) >= seen.step)
      lowest = std::max(lowest, seen.idx);
  return lowest;
}

/// The thread reads store @p idx.
uint64_t HostMemory::see(int thread_idx, Word& word, uint64_t idx, Order order) {
  Thread& self = thread(thread_idx);
  const Store& store = word.stores[static_cast<size_t>(idx - word.first_idx)];
  const uint64_t value = store.value;
  if (order == Order::kAcquire)
    join(thread_idx, store.message);
  else
    self.unfenced.join(store.message);
  for (Seen& seen : word.seen)
    if (seen.thread == thread_idx && (seen.idx == idx || seen.step == self.step)) {
      // A later step of an equal view would only hide less.
      seen.idx = std::max(seen.idx, idx);
      return value;
    }
  word.seen.push_back({thread_idx, self.step, idx});
  return value;
}

void HostMemory::push(int thread_idx, Word& word, uint64_t value, Clock message) {
  // The message, if it is a release, was closed after this step.
  word.stores.push_back({value, slot_of(thread_idx), thread(thread_idx).step, std::move(message)});
  if (word.stores.size() <= kMostStores)
    return;
  word.stores.erase(word.stores.begin());
  ++word.first_idx;
  std::erase_if(word.seen, [&](const Seen& seen) { return seen.idx < word.first_idx; });
}

uint64_t HostMemory::load(int thread_idx, const void* address, size_t bytes, Order order) {
  Word& word = word_at(thread_idx, address, bytes, false);
  const uint64_t newest = word.first_idx + word.stores.size() - 1;
  const uint64_t lowest = floor(thread(thread_idx), thread_idx, word);
  uint64_t idx = newest;
  if (lowest < newest && random_->chance(1, kStaleOf))
    idx = lowest + random_->below(static_cast<uint32_t>(newest - lowest + 1));
  return see(thread_idx, word, idx, order);
}

void HostMemory::store(int thread_idx, void* address, uint64_t value, size_t bytes, Order order) {
  Word& word = word_at(thread_idx, address, bytes, true);
  put(address, value, bytes);
  Thread& self = thread(thread_idx);
  push(thread_idx, word, cut(value, bytes), order == Order::kRelease ? Clock() : self.fenced);
  if (order == Order::kRelease)
    word.stores.back().message = close(thread_idx);
}

uint64_t HostMemory::add(int thread_idx, void* address, uint64_t value, size_t bytes) {
  Word& word = word_at(thread_idx, address, bytes, true);
  const uint64_t newest = word.first_idx + word.stores.size() - 1;
  const uint64_t former = see(thread_idx, word, newest, Order::kAcquire);
  const uint64_t sum = cut(former + value, bytes);
  put(address, sum, bytes);
  const Clock continued = word.stores.back().message;  // a release sequence goes on
  push(thread_idx, word, sum, {});
  Clock message = close(thread_idx);
  message.join(continued);
  word.stores.back().message = std::move(message);
  return former;
}

bool HostMemory::compare_exchange(
    int thread_idx, void* address, uint64_t expected, uint64_t desired, size_t bytes) {
  if (latest(address, bytes) != cut(expected, bytes)) {
    Word& word = word_at(thread_idx, address, bytes, false);
    see(thread_idx, word, word.first_idx + word.stores.size() - 1, Order::kAcquire);
    return false;
  }
  add(thread_idx, address, cut(desired - expected, bytes), bytes);
  return true;
}

void HostMemory::fence_acquire(int thread_idx) {
  // What changes after the fence was read before.
  examine_pulls(thread_idx);
  // A thread that saw bytes that were written after a fence knows, from its own fence on, what came
  // before that one, as if the bytes were words read and written relaxed.
  for (const Pull& pull : thread(thread_idx).pulls) {
    const Cell& pulled = cell(pull.cell_idx);
    if (pulled.write_slot != kNobody &&
        !knows(thread(thread_idx), thread_idx, pulled.write_slot, pulled.write_step))
      join(thread_idx, thread(pulled.write_slot / 2).fenced);
  }
  join(thread_idx, std::exchange(thread(thread_idx).unfenced, Clock()));
}

void HostMemory::fence_seq_cst(int thread_idx) {
  fence_acquire(thread_idx);
  Thread& self = thread(thread_idx);
  self.fenced = close(thread_idx);
  fences_.join(self.visible);
  self.visible.join(fences_);
}

}  // namespace moe::simt::checker
