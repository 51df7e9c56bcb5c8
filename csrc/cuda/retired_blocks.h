#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "heap/window_allocator.h"
#include "runtime/stream_marks.h"

namespace moe::cuda {

/// Blocks that were given back and that streams may still use. Not thread-safe.
class RetiredBlocks {
 public:
  using Block = heap::WindowAllocator::Block;
  using Mark = runtime::StreamMarks::Mark;

  bool is_empty() const { return retired_.empty(); }
  void add(Block* block, std::shared_ptr<Mark> mark) {
    retired_.push_back({block, std::move(mark)});
  }

  /// Gives @p free every block whose work has ended.
  /// @param has_passed  Returns whether a mark has passed. What it throws is thrown; no block is
  ///   given twice.
  template <typename HasPassed, typename Free>
  void reclaim(HasPassed&& has_passed, Free&& free) {
    // In two steps: asking throws where the device has failed.
    for (Retired& entry : retired_) {
      if (entry.mark == nullptr || !has_passed(*entry.mark))
        continue;
      entry.mark = nullptr;
      free(entry.block);
    }
    std::erase_if(retired_, [](const Retired& entry) { return entry.mark == nullptr; });
  }

 private:
  struct Retired {
    Block* block;
    std::shared_ptr<Mark> mark;  ///< null once the block is free
  };
  std::vector<Retired> retired_;
};

}  // namespace moe::cuda
