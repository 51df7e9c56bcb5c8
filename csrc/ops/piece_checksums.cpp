#include "ops/piece_checksums.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "cpu/row_kernels.h"
#include "cpu/strided_copy.h"
#include "cpu/thread_pool.h"

namespace moe::ops {

namespace {

// Below this a thread takes longer to start than to read its share.
constexpr int64_t kLeastBytesOfThreads = int64_t{4} << 20;

std::optional<uint64_t> checksum_as_sent(const CopyItem& piece,
                                         const std::vector<std::shared_ptr<PreparedCopies>>& sent) {
  for (const auto& copies : sent)
    if (const auto checksum = copies->checksum_of(piece))
      return checksum;
  return std::nullopt;
}

}  // namespace

PieceChecksums::PieceChecksums(std::vector<CopyItem> pieces, std::shared_ptr<void> owner)
    : pieces_(std::move(pieces)), owner_(std::move(owner)) {
  for (const CopyItem& piece : pieces_)
    bytes_ += piece.shape.bytes;
}

std::vector<uint64_t> PieceChecksums::compute(
    const std::vector<std::shared_ptr<PreparedCopies>>& sent, int num_threads) const {
  std::vector<uint64_t> checksums(pieces_.size());
  std::vector<size_t> to_read;
  std::vector<int64_t> ends;  // [to_read], in blocks of all pieces that are read
  int64_t num_blocks = 0;
  for (size_t idx = 0; idx < pieces_.size(); ++idx) {
    if (const auto known = checksum_as_sent(pieces_[idx], sent)) {
      checksums[idx] = *known;
      continue;
    }
    to_read.push_back(idx);
    num_blocks +=
        (pieces_[idx].shape.bytes + cpu::kChecksumBlockBytes - 1) / cpu::kChecksumBlockBytes;
    ends.push_back(num_blocks);
  }
  const cpu::RowKernels& kernels = cpu::best_row_kernels();
  const auto read_blocks = [&](int64_t begin, int64_t end) {
    auto at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    while (begin < end) {
      const int64_t first = at == 0 ? 0 : ends[at - 1];
      const int64_t stop = std::min(end, ends[at]);
      const CopyItem& piece = pieces_[to_read[at]];
      const int64_t from = (begin - first) * cpu::kChecksumBlockBytes;
      const int64_t to = std::min((stop - first) * cpu::kChecksumBlockBytes, piece.shape.bytes);
      const uint64_t blocks = cpu::copy_with_checksum(kernels,
                                                      piece.place(),
                                                      piece.shape.bytes,
                                                      from,
                                                      cpu::Place{},
                                                      0,
                                                      to - from,
                                                      cpu::StoreMode::kCached);
      std::atomic_ref<uint64_t>(checksums[to_read[at]])
          .fetch_add(blocks, std::memory_order_relaxed);
      begin = stop;
      ++at;
    }
  };
  cpu::ThreadPool threads(bytes_ < kLeastBytesOfThreads ? 1 : num_threads);
  threads.parallel_for(num_blocks, read_blocks);
  for (const size_t idx : to_read)
    checksums[idx] = cpu::finish_checksum(checksums[idx], pieces_[idx].shape.bytes);
  return checksums;
}

}  // namespace moe::ops
