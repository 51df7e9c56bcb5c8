// Ranks as threads of one process use the heap as hard as they can, for a sanitizer to watch:
// windows are written by peers and freed by other threads, while segments are added, trimmed and
// announced.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"

namespace {

using moe::Offer;
using moe::PeerState;
using moe::Window;
using moe::heap::HeapOptions;
using moe::heap::PeerMesh;
using moe::heap::ShmHeap;

constexpr int kNumRanks = 3;
constexpr int kNumRounds = 150;
constexpr double kTimeoutS = 60.0;

void require(bool condition, const char* what) {
  if (condition)
    return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

/// Takes windows from everybody and frees them on a thread of its own.
class Undertaker {
 public:
  Undertaker() : thread_([this] { run(); }) {}
  ~Undertaker() {
    is_done_ = true;
    thread_.join();
  }

  void bury(std::shared_ptr<Window> window) {
    const std::lock_guard lock(mutex_);
    windows_.push_back(std::move(window));
  }

 private:
  void run() {
    while (!is_done_) {
      std::vector<std::shared_ptr<Window>> windows;
      {
        const std::lock_guard lock(mutex_);
        windows.swap(windows_);
      }
      std::this_thread::yield();
    }
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Window>> windows_;
  std::atomic<bool> is_done_{false};
  std::thread thread_;
};

std::string wait_message(PeerMesh& mesh, int rank_idx, uint64_t channel, uint64_t sequence) {
  std::string payload;
  while (!mesh.take(rank_idx, channel, sequence, &payload))
    std::this_thread::yield();
  return payload;
}

void run_rank(PeerMesh& mesh, ShmHeap& heap, Undertaker& undertaker) {
  const int rank_idx = mesh.rank_idx();
  const int next_rank = (rank_idx + 1) % kNumRanks;
  const int last_rank = (rank_idx + kNumRanks - 1) % kNumRanks;
  std::mt19937_64 random(static_cast<uint64_t>(rank_idx) + 1);
  std::atomic<int> num_calls{0};
  const int listener_id = mesh.add_listener([&] { num_calls.fetch_add(1); });
  for (uint64_t round = 0; round < kNumRounds; ++round) {
    const uint64_t bytes = 1 + random() % (round % 10 == 0 ? 3'000'000 : 100'000);
    std::shared_ptr<Window> window = heap.allocate(bytes);
    const Offer offer = window->offer();
    // The next rank fills the window; its answer orders its writes before this rank's reads.
    mesh.post(
        next_rank, 1, round, std::string(reinterpret_cast<const char*>(&offer), sizeof offer));
    const std::string asked = wait_message(mesh, last_rank, 1, round);
    Offer theirs;
    std::memcpy(&theirs, asked.data(), sizeof theirs);
    std::byte* target = nullptr;
    while ((target = heap.try_resolve(last_rank, theirs)) == nullptr)
      std::this_thread::yield();
    std::memset(target, static_cast<int>(round & 0xFF), theirs.bytes);
    mesh.post(last_rank, 2, round, "filled");
    wait_message(mesh, next_rank, 2, round);
    const std::byte value{static_cast<unsigned char>(round & 0xFF)};
    require(
        std::all_of(
            window->data(), window->data() + bytes, [&](std::byte byte) { return byte == value; }),
        "a peer's bytes arrived");
    Offer found;
    require(heap.find(window->data(), bytes, &found) && found.offset == offer.offset, "find");
    if (round % 3 == 0)
      window->shrink(bytes / 2);
    if (round % 7 == 0)
      window->quarantine();
    if (round % 20 == 19)
      heap.end_quarantine();
    if (round % 25 == 24)
      heap.trim();
    if (round % 11 == 0)
      undertaker.bury(heap.allocate_free(50'000));
    static_cast<void>(heap.stats());
    undertaker.bury(std::move(window));
  }
  require(num_calls.load() > 0, "listeners are called");
  mesh.remove_listener(listener_id);
}

}  // namespace

int main() {
  Undertaker undertaker;
  std::vector<std::shared_ptr<PeerMesh>> meshes;
  std::vector<std::string> addresses;
  for (int rank_idx = 0; rank_idx < kNumRanks; ++rank_idx) {
    meshes.push_back(PeerMesh::create());
    addresses.push_back(meshes.back()->address());
  }
  std::vector<std::thread> threads;
  for (int rank_idx = 0; rank_idx < kNumRanks; ++rank_idx)
    threads.emplace_back([&, rank_idx, mesh = meshes[static_cast<size_t>(rank_idx)]] {
      mesh->connect(rank_idx, addresses, {.timeout_s = kTimeoutS, .interrupt_check = {}});
      HeapOptions options;
      options.with_huge_pages = false;
      const auto heap = ShmHeap::create(mesh, options);
      run_rank(*mesh, *heap, undertaker);
      // Nobody leaves while a peer still writes: a last round of messages.
      for (int peer_rank = 0; peer_rank < kNumRanks; ++peer_rank)
        mesh->post(peer_rank, 3, 0, "done");
      for (int peer_rank = 0; peer_rank < kNumRanks; ++peer_rank)
        wait_message(*mesh, peer_rank, 3, 0);
      mesh->leave();
    });
  meshes.clear();
  for (std::thread& thread : threads)
    thread.join();
  std::puts("ok");
  return 0;
}
