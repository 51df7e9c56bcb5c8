#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/sync.h"
#include "group/aborts.h"
#include "group/entry_waits.h"
#include "group/membership.h"

namespace moe::group {

/// Work of the link's service thread for one communicator of this rank: it stores what ranks of
/// other nodes say and ranks of this node store themselves (aborts, and ends of buffers) as soon as
/// it arrives, so that no wait has to look at the link; and it answers peers that look for who
/// holds them up. Thread-safe.
class Mail {
 public:
  Mail(const Membership& ranks, Aborts& aborts) : ranks_(ranks), aborts_(aborts) {}
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  /// Takes and answers all that has arrived. Called by the service thread.
  void take_all();
  /// A recovery has ended here: hears the last aborts that it ends, and those that follow it.
  void begin_generation();

  /// Tells ranks of other nodes that this rank has destroyed a buffer, as
  /// RetiredMemory::close_control() does on this node.
  void post_end(uint64_t buffer_number, uint64_t next_epoch) const;
  /// Ranks of other nodes that end that buffer raise their words from now on, before any wait looks
  /// at them.
  /// @param closed_words  Word of each rank in this rank's control area, by rank.
  void watch_ends(uint64_t buffer_number, std::vector<uint64_t*> closed_words);
  /// From now on peers are told whom this rank waits for in an operation of that buffer.
  /// @param awaited_rank  Returns it, -1 for nobody.
  void answer_for(uint64_t buffer_number, std::function<int()> awaited_rank);
  /// There is nothing more to do for that buffer.
  void forget_buffer(uint64_t buffer_number);

  /// Sends a rank the question whom it waits for in an operation of that buffer; its service thread
  /// answers. @return the number of the question.
  uint64_t ask_awaited(int rank_idx, uint64_t buffer_number);
  /// @return That rank, -1 for nobody; nothing where the answer has not come.
  std::optional<int> take_answer(int rank_idx, uint64_t question_number) const;

  /// Entries and waits of this rank, for peers that wait for each other in different
  /// calls; outlives this.
  const std::shared_ptr<EntryTable>& entries() const { return entries_; }

 private:
  void take_ends_locked();
  void take_aborts_locked();
  void answer_questions();

  const Membership& ranks_;
  Aborts& aborts_;
  sync::Mutex mutex_;
  std::map<uint64_t, std::vector<uint64_t*>> closed_words_;  ///< by buffer number, then by rank
  std::map<uint64_t, std::function<int()>> awaited_ranks_;   ///< by buffer number
  std::atomic<uint64_t> num_questions_{0};
  std::shared_ptr<EntryTable> entries_ = std::make_shared<EntryTable>();
};

}  // namespace moe::group
