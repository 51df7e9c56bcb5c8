#include "simt/nic.h"

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/error.h"
#include "simt/memory.h"
#include "simt/scheduler.h"

namespace moe::simt {

namespace {

struct SymmetricMemory {
  std::byte* own = nullptr;
  int64_t bytes = 0;
  std::vector<std::byte*> peers;
  std::atomic<uint64_t> sent_bytes{0};
};

struct Registry {
  std::mutex mutex;
  std::map<const std::byte*, std::shared_ptr<SymmetricMemory>> memories;  ///< by begin

  std::shared_ptr<SymmetricMemory> find(const std::byte* address, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = memories.upper_bound(address);
    if (found == memories.begin())
      return nullptr;
    --found;
    const int64_t offset = address - found->second->own;
    return offset + bytes <= found->second->bytes ? found->second : nullptr;
  }
};

Registry& registry() {
  static auto* const registry = new Registry;  // never destroyed: streams may end after main()
  return *registry;
}

}  // namespace

void Nic::connect(std::byte* own, int64_t bytes, std::vector<std::byte*> peers) {
  auto memory = std::make_shared<SymmetricMemory>();
  memory->own = own;
  memory->bytes = bytes;
  memory->peers = std::move(peers);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.memories[own] = std::move(memory);
}

void Nic::disconnect(std::byte* own) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.memories.erase(own);
}

uint64_t Nic::sent_bytes(const std::byte* own) {
  const auto memory = registry().find(own, 0);
  return memory ? memory->sent_bytes.load(std::memory_order_relaxed) : 0;
}

namespace {

struct Put {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  uint64_t* signal = nullptr;
  uint64_t value = 0;

  void make() const {
    if (bytes > 0)
      std::memcpy(to, from, static_cast<size_t>(bytes));
    std::atomic_ref(*signal).store(value, std::memory_order_release);
  }
};

/// Puts of one OS thread's fibers that have not been made yet.
class Queue {
 public:
  void add(Put put) {
    puts_.push_back(put);
    if (has_fiber_)
      return;
    has_fiber_ = true;
    Scheduler::current()->spawn([this] { work(); }, "puts");
  }

  void make_all() {
    while (!puts_.empty())
      make_any();
  }

 private:
  /// The fiber that is to make puts has ended, or unwinds because another failed.
  struct AtEnd {
    Queue& queue;
    ~AtEnd() {
      queue.puts_.clear();
      queue.has_fiber_ = false;
    }
  };

  void work() {
    const AtEnd at_end{*this};
    while (!puts_.empty()) {
      for (uint64_t i = draw() % 4; i > 0; --i)
        Scheduler::current()->idle(0);
      if (!puts_.empty())
        make_any();
    }
  }

  void make_any() {
    const size_t idx = draw() % puts_.size();
    const Put put = puts_[idx];
    puts_.erase(puts_.begin() + static_cast<ptrdiff_t>(idx));
    put.make();
  }

  /// After G. Marsaglia, "Xorshift RNGs" (2003).
  uint64_t draw() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }

  std::vector<Put> puts_;
  bool has_fiber_ = false;
  uint64_t state_ = 0x9E3779B97F4A7C15ull;
};

Queue& queue() {
  thread_local Queue queue;
  return queue;
}

std::byte* on_peer(const SymmetricMemory& memory, const void* address, int pe) {
  if (pe < 0 || static_cast<size_t>(pe) >= memory.peers.size() ||
      memory.peers[static_cast<size_t>(pe)] == nullptr)
    throw EmulationError(
        concat("a put to rank ", pe, ", which symmetric memory at ", memory.own, " does not join"));
  return memory.peers[static_cast<size_t>(pe)] +
         (static_cast<const std::byte*>(address) - memory.own);
}

std::shared_ptr<SymmetricMemory> find_memory(const void* address, int64_t bytes) {
  auto memory = registry().find(static_cast<const std::byte*>(address), bytes);
  if (!memory)
    throw EmulationError(
        concat("a put of ", bytes, " bytes at ", address, ", which is not symmetric memory"));
  return memory;
}

}  // namespace

namespace memory {

void put_signal(
    int pe, std::byte* to, const std::byte* from, int64_t bytes, uint64_t* signal, uint64_t value) {
  Put put;
  const auto signals = find_memory(signal, sizeof(uint64_t));
  put.signal = reinterpret_cast<uint64_t*>(on_peer(*signals, signal, pe));
  put.value = value;
  if (bytes > 0) {
    const auto sources = find_memory(from, bytes);
    put.to = on_peer(*find_memory(to, bytes), to, pe);
    put.from = from;
    put.bytes = bytes;
    sources->sent_bytes.fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
  }
  queue().add(put);
}

void take_put(const uint64_t* /*signal*/) {}

void quiet() {
  queue().make_all();
}

}  // namespace memory

}  // namespace moe::simt
