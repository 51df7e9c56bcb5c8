#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/sync.h"
#include "schedules/finding.h"
#include "schedules/random.h"
#include "schedules/vector_clock.h"

namespace moe::simt::checker {

/// Memory that threads of the CPU backend share, as the C++ memory model allows them to see it.
///
/// Words have a history: a load may return any value that is neither hidden by something the thread
/// knows nor ordered away by sequentially consistent fences, so that what is missing between a
/// store and a load shows. Plain bytes hold one value; every two accesses of which one writes must
/// be ordered (vector clocks; FastTrack, Flanagan and Freund 2009). Stores past the caches count as
/// made by somebody else until the thread's store fence. The heap tells which bytes are in use.
///
/// Histories of words after "CDSChecker" (Norris and Demsky 2013), without its exhaustive search.
class HostMemory {
 public:
  static constexpr int kMaxThreads = 16;
  static constexpr int64_t kArenaBytes = int64_t{1} << 20;

  enum class Manner : uint8_t { kPlain, kStreaming };

  HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// Forgets everything; contents of the arena are arbitrary.
  void reset(Random* random, Findings* findings);
  int add_thread(std::string name);

  std::byte* arena() const { return arena_; }
  bool is_shared(const void* address) const {
    return static_cast<uintptr_t>(static_cast<const std::byte*>(address) - arena_) <
           static_cast<uintptr_t>(kArenaBytes);
  }

  // Words of 4 or 8 bytes, by thread.
  uint64_t load(int thread, const void* word, size_t bytes, sync::checked::Order order);
  void store(int thread, void* word, uint64_t value, size_t bytes, sync::checked::Order order);
  uint64_t add(int thread, void* word, uint64_t value, size_t bytes);
  bool compare_exchange(int thread, void* word, uint64_t expected, uint64_t desired, size_t bytes);
  void fence_seq_cst(int thread);
  void fence_acquire(int thread);
  /// Content of memory in the end, which the kernel compares.
  static uint64_t latest(const void* word, size_t bytes);

  // Plain bytes; the caller moves them.
  void read(int thread, const void* from, size_t bytes);
  /// A read that counts only once it is confirmed.
  void pull(int thread, const void* from, size_t bytes);
  void confirm_pulls(int thread);
  /// The thread's operation has failed. It may write from now on to what peers pull: they find out
  /// when they confirm.
  void drop_pulls(int thread);
  /// A copy of bytes that need not all have been written.
  void read_loosely(int thread, const void* from, size_t bytes);
  void write(int thread, const void* to, size_t bytes, Manner manner);
  void store_fence(int thread);

  /// The thread changes @p object, which one thread may change at a time.
  void note_exclusive(int thread, const void* object);

  // Told by the heap.
  void allocate(int thread, const void* begin, size_t bytes);
  void free(int thread, const void* begin, size_t bytes);

  // Order by other means than words: locks, messages, deaths.
  Clock close(int thread);
  void join(int thread, const Clock& clock);

  /// "heap of rank 1 + 320"; ranks have equal parts of the arena.
  void set_part_bytes(int64_t bytes) { part_bytes_ = bytes; }

 private:
  static constexpr int64_t kCellBytes = 4;
  static constexpr int64_t kPageCells = 64;
  static constexpr int64_t kNumPages = kArenaBytes / (kCellBytes * kPageCells);
  static constexpr size_t kMostStores = 6;
  static constexpr int16_t kNobody = -1;

  struct Cell {
    uint32_t write_step = 0;
    int16_t write_slot = kNobody;
    bool is_live = false;
    bool is_written = false;
    bool is_word = false;  ///< has a history
    bool is_atomic_write = false;
    std::array<uint32_t, kMaxThreads> reads{};    ///< plain ones, by thread: the last step
    std::array<uint32_t, kMaxThreads> pulls{};    ///< confirmed ones
    std::array<uint32_t, kMaxThreads> atomics{};  ///< accesses as a word, by thread
  };
  using Page = std::array<Cell, kPageCells>;

  struct Store {
    uint64_t value = 0;
    int slot = kNobody;
    uint32_t step = 0;
    Clock message;  ///< what an acquiring load comes to know
  };
  struct Seen {
    int thread;
    uint32_t step;
    uint64_t idx;
  };
  struct Word {
    uint64_t first_idx = 0;  ///< of stores[0], in the order of modification
    std::vector<Store> stores;
    std::vector<Seen> seen;
  };
  struct Pull {
    int64_t cell_idx;
    int16_t write_slot;  ///< when it was read
    uint32_t write_step;
  };
  struct Thread {
    std::string name;
    std::vector<Pull> pulls;
    std::vector<Finding> doubts;  ///< about pulls, at the last fence
    bool has_failed = false;
    uint32_t step = 1;
    uint32_t streaming_step = 1;
    Clock known;
    Clock visible;   ///< known, and what sequentially consistent fences forbid to miss
    Clock unfenced;  ///< of relaxed loads since the last fence
    Clock fenced;    ///< what relaxed stores release since the last fence
  };

  static int slot_of(int thread) { return 2 * thread; }
  static int streaming_slot_of(int thread) { return 2 * thread + 1; }
  Thread& thread(int idx) { return threads_[static_cast<size_t>(idx)]; }
  bool knows(const Thread& thread, int thread_idx, int slot, uint32_t step) const;
  void examine_pulls(int thread_idx);
  Cell& cell(int64_t idx);
  template <typename Body>
  void for_cells(const void* begin, size_t bytes, Body&& body);
  void check(int thread_idx, Cell& cell, int64_t idx, bool is_write, bool is_atomic);
  Word& word_at(int thread_idx, const void* address, size_t bytes, bool is_write);
  uint64_t floor(const Thread& thread, int thread_idx, const Word& word) const;
  uint64_t see(int thread_idx, Word& word, uint64_t idx, sync::checked::Order order);
  void push(int thread_idx, Word& word, uint64_t value, Clock message);
  std::string describe(int64_t cell_idx) const;
  std::string name_of(int slot) const;
  void found(Kind kind, int thread_idx, const std::string& text);

  std::unique_ptr<std::byte[]> storage_;
  std::byte* arena_ = nullptr;
  int64_t part_bytes_ = kArenaBytes;
  std::vector<std::unique_ptr<Page>> pages_;
  std::vector<int64_t> used_pages_;
  std::vector<uint8_t> is_page_used_;
  std::unordered_map<const void*, Word> words_;
  std::vector<Thread> threads_;
  std::unordered_map<const void*, std::pair<int, uint32_t>> changes_;  ///< last thread and step
  Clock fences_;  ///< what sequentially consistent fences have published
  Random* random_ = nullptr;
  Findings* findings_ = nullptr;
};

}  // namespace moe::simt::checker
