#include "ops/piece_checksums.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <utility>

#include "core/error.h"
#include "cpu/row_kernels.h"
#include "cpu/strided_copy.h"
#include "cpu/thread_pool.h"

namespace moe::ops {

namespace {

std::optional<uint64_t> checksum_as_sent(const CopyItem& piece,
                                         const std::vector<std::shared_ptr<PreparedCopies>>& sent) {
  for (const auto& copies : sent)
    if (const auto checksum = copies->checksum_of(piece))
      return checksum;
  return std::nullopt;
}

/// The part of a piece's checksum that is of these bytes, which begin with a block.
uint64_t sum_of_blocks(const CopyItem& piece, int64_t from, int64_t bytes) {
  return cpu::copy_with_checksum(cpu::best_row_kernels(),
                                 piece.place(),
                                 piece.shape.bytes,
                                 from,
                                 cpu::Place{},
                                 0,
                                 bytes,
                                 cpu::StoreMode::kCached);
}

}  // namespace

PieceChecksums::PieceChecksums(std::vector<CopyItem> pieces, std::shared_ptr<void> owner)
    : pieces_(std::move(pieces)), owner_(std::move(owner)) {
  for (const CopyItem& piece : pieces_)
    bytes_ += piece.shape.bytes;
}

template <typename Read>
void PieceChecksums::for_blocks(const std::vector<size_t>& to_read,
                                int64_t block_bytes,
                                int num_threads,
                                Read&& read) const {
  std::vector<int64_t> ends;  // [to_read], in blocks of all pieces that are read
  int64_t count = 0;
  for (const size_t idx : to_read)
    ends.push_back(count += num_blocks(idx, block_bytes));
  const auto read_blocks = [&](int64_t begin, int64_t end) {
    auto at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    while (begin < end) {
      const int64_t first = at == 0 ? 0 : ends[at - 1];
      const int64_t stop = std::min(end, ends[at]);
      const int64_t from = (begin - first) * block_bytes;
      const int64_t to = std::min((stop - first) * block_bytes, pieces_[to_read[at]].shape.bytes);
      read(to_read[at], from, to - from);
      begin = stop;
      ++at;
    }
  };
  cpu::ThreadPool threads(bytes_ < cpu::kBytesWorthAThread ? 1 : num_threads);
  threads.parallel_for(count, read_blocks);
}

std::vector<uint64_t> PieceChecksums::compute(
    const std::vector<std::shared_ptr<PreparedCopies>>& sent, int num_threads) const {
  std::vector<uint64_t> checksums(pieces_.size());
  std::vector<size_t> to_read;
  for (size_t idx = 0; idx < pieces_.size(); ++idx) {
    if (const auto known = checksum_as_sent(pieces_[idx], sent))
      checksums[idx] = *known;
    else
      to_read.push_back(idx);
  }
  const auto read = [&](size_t idx, int64_t from, int64_t bytes) {
    std::atomic_ref<uint64_t>(checksums[idx])
        .fetch_add(sum_of_blocks(pieces_[idx], from, bytes), std::memory_order_relaxed);
  };
  for_blocks(to_read, cpu::kChecksumBlockBytes, num_threads, read);
  for (const size_t idx : to_read)
    checksums[idx] = cpu::finish_checksum(checksums[idx], pieces_[idx].shape.bytes);
  return checksums;
}

void PieceChecksums::compute_blocks(int64_t block_bytes,
                                    const uint8_t* wanted,
                                    int num_threads,
                                    uint64_t* sums) const {
  std::vector<size_t> all(pieces_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  std::vector<int64_t> first(pieces_.size());
  for (size_t idx = 1; idx < pieces_.size(); ++idx)
    first[idx] = first[idx - 1] + num_blocks(idx - 1, block_bytes);
  for_blocks(all, block_bytes, num_threads, [&](size_t idx, int64_t from, int64_t bytes) {
    const CopyItem& piece = pieces_[idx];
    int64_t block = first[idx] + from / block_bytes;
    for (int64_t at = from; at < from + bytes; at += block_bytes, ++block)
      if (wanted == nullptr || wanted[block] != 0)
        sums[block] = sum_of_blocks(piece, at, std::min(block_bytes, piece.shape.bytes - at));
  });
}

std::vector<uint64_t> PieceChecksums::of_blocks(int64_t block_bytes, const uint64_t* sums) const {
  std::vector<uint64_t> checksums;
  for (size_t idx = 0; idx < pieces_.size(); ++idx) {
    const int64_t count = num_blocks(idx, block_bytes);
    checksums.push_back(cpu::finish_checksum(std::accumulate(sums, sums + count, uint64_t{0}),
                                             pieces_[idx].shape.bytes));
    sums += count;
  }
  return checksums;
}

void PieceChecksums::move_blocks(size_t first,
                                 size_t end,
                                 int64_t block_bytes,
                                 const uint8_t* wanted,
                                 std::byte* packed,
                                 int64_t packed_bytes,
                                 bool is_packing,
                                 int num_threads) const {
  struct Block {
    const CopyItem* piece;
    int64_t from;
    int64_t bytes;
    int64_t at;
  };
  std::vector<Block> blocks;
  int64_t at = 0;
  for (size_t idx = first; idx < end; ++idx) {
    const CopyItem& piece = pieces_[idx];
    for (int64_t from = 0; from < piece.shape.bytes; from += block_bytes) {
      if (*wanted++ == 0)
        continue;
      const int64_t bytes = std::min(block_bytes, piece.shape.bytes - from);
      blocks.push_back({&piece, from, bytes, at});
      at += bytes;
    }
  }
  MOE_CHECK(at == packed_bytes, "blocks of ", at, " bytes are wanted, got ", packed_bytes);
  const cpu::RowKernels& kernels = cpu::best_row_kernels();
  const auto copy = [&](int64_t begin, int64_t stop) {
    for (int64_t i = begin; i < stop; ++i) {
      const Block& block = blocks[static_cast<size_t>(i)];
      const cpu::Place there{packed + block.at, nullptr};
      if (is_packing)
        cpu::copy_strided(kernels,
                          block.piece->place(),
                          block.from,
                          there,
                          0,
                          block.bytes,
                          cpu::StoreMode::kCached);
      else
        cpu::copy_strided(kernels,
                          there,
                          0,
                          block.piece->place(),
                          block.from,
                          block.bytes,
                          cpu::StoreMode::kCached);
    }
  };
  cpu::ThreadPool threads(at < cpu::kBytesWorthAThread ? 1 : num_threads);
  threads.parallel_for(static_cast<int64_t>(blocks.size()), copy);
}

}  // namespace moe::ops
