#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/prepared_copies.h"

namespace moe::ops {

/// Checksums of pieces of this rank's tensors, computed as often as asked for.
class PieceChecksums {
 public:
  /// @param owner  Keeps the tensors.
  PieceChecksums(std::vector<CopyItem> pieces, std::shared_ptr<void> owner);

  /// Of all pieces, in their order. One that some of @p sent has hashed where it lies, as it was
  /// sent, is not read again.
  /// @param num_threads  That read, the caller included.
  std::vector<uint64_t> compute(const std::vector<std::shared_ptr<PreparedCopies>>& sent,
                                int num_threads) const;

 private:
  std::vector<CopyItem> pieces_;
  std::shared_ptr<void> owner_;
  int64_t bytes_ = 0;  ///< of all pieces
};

}  // namespace moe::ops
