#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "group/group.h"
#include "group/trace.h"

namespace moe::ops {

/// Object of collective operations, one after the other, under epochs of its own: a buffer,
/// or a batched copy. Peers know it by its number.
class BufferBase : public group::Recoverable {
 public:
  group::Group& group() const { return *group_; }
  const std::shared_ptr<group::Group>& shared_group() const { return group_; }
  int rank_idx() const { return group_->rank_idx(); }
  int num_ranks() const { return group_->num_ranks(); }
  uint64_t buffer_number() const { return buffer_number_; }
  /// "buffer": what errors call it.
  virtual const char* noun() const { return "buffer"; }
  virtual bool is_on_progress_thread() const { return false; }
  group::Tracer& tracer() { return tracer_; }
  bool is_destroyed() const { return is_destroyed_.load(); }

  uint64_t next_epoch() const { return next_epoch_; }
  uint64_t take_epoch() { return next_epoch_++; }
  /// Sets the epoch of the next operation where others took those before: graphs.
  void set_next_epoch(uint64_t epoch) { next_epoch_ = epoch; }
  void complete_epoch(uint64_t epoch) { last_completed_.store(epoch, std::memory_order_relaxed); }

  Epochs epochs() const override {
    return {next_epoch_, last_completed_.load(std::memory_order_relaxed)};
  }
  void restart(uint64_t next_epoch) override { next_epoch_ = next_epoch; }

 protected:
  explicit BufferBase(std::shared_ptr<group::Group> group) : group_(std::move(group)) {}

  /// It is named by the collective call that makes it, which comes next.
  void take_number() { buffer_number_ = group_->next_gather_sequence(); }
  /// @return false where it was destroyed before.
  bool become_destroyed() { return !is_destroyed_.exchange(true); }
  /// Tells peers, and gives the control area back once they all did. Where there is none, or that
  /// of the peers is not known, nobody hears anything.
  /// @param windows      Windows of the control area.
  /// @param closed_word  closed_word(owner, rank): the word of @p rank in the area of @p owner, one
  ///   of which is this rank; null where nobody writes there.
  template <typename ClosedWord>
  void close_control(std::vector<std::shared_ptr<Window>> windows, ClosedWord&& closed_word) {
    std::vector<uint64_t*> peer_words;
    std::vector<const uint64_t*> own_words;
    for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
      peer_words.push_back(closed_word(peer_rank, rank_idx()));
      own_words.push_back(closed_word(rank_idx(), peer_rank));
    }
    group_->retired().close_control(
        std::move(windows), peer_words, std::move(own_words), next_epoch_);
  }

 private:
  std::shared_ptr<group::Group> group_;
  uint64_t buffer_number_ = 0;
  uint64_t next_epoch_ = 1;  // 0 is the flag of memory that was never written
  std::atomic<uint64_t> last_completed_{0};
  std::atomic<bool> is_destroyed_{false};
  group::Tracer tracer_;
};

/// A shared buffer. A forked child has neither the threads nor the memory: its copy cannot be taken
/// apart.
template <typename Buffer>
std::shared_ptr<Buffer> share_buffer(Buffer* made) {
  return std::shared_ptr<Buffer>(made, [](Buffer* buffer) {
    if (!buffer->group().is_forked_child())
      delete buffer;
  });
}

}  // namespace moe::ops
