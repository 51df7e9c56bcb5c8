#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/row_kernels.h"

namespace moe::cpu {

// Large calls collect the scale factors of successive rows of a stream (an expert's rows of one
// sender), so that they are written past the caches, a line at a time, as rows are. A line that is
// stored through the cache is read first, and the rows behind it wait for that.

inline constexpr int64_t kStagedLineBytes = 64;

/// Row-major scale factors: those of a row lie side by side, and those of the next row behind them.
class ScaleRowStage {
 public:
  /// @param row_bytes  bytes of the scale factors of a row.
  ScaleRowStage(const RowKernels& kernels, int64_t num_streams, int64_t row_bytes)
      : kernels_(kernels),
        row_bytes_(row_bytes),
        capacity_(row_bytes + kStagedLineBytes),
        streams_(static_cast<size_t>(num_streams)),
        staged_(static_cast<size_t>(num_streams * capacity_)) {}

  /// @param place  address of the row's scale factors.
  void add(int64_t stream_idx, std::byte* place, const std::byte* scales) {
    Stream& stream = streams_[static_cast<size_t>(stream_idx)];
    if (place != stream.first + stream.bytes) {
      flush(stream_idx);
      stream.first = place;
    }
    std::byte* const staged = this->staged(stream_idx);
    std::memcpy(staged + stream.bytes, scales, static_cast<size_t>(row_bytes_));
    stream.bytes += row_bytes_;
    const auto past_lines = static_cast<int64_t>(
        reinterpret_cast<uintptr_t>(stream.first + stream.bytes) % kStagedLineBytes);
    if (past_lines >= stream.bytes)
      return;
    const int64_t whole = stream.bytes - past_lines;
    kernels_.copy(staged, stream.first, whole, StoreMode::kStreaming);
    std::memmove(staged, staged + whole, static_cast<size_t>(past_lines));
    stream.first += whole;
    stream.bytes = past_lines;
  }

  void flush_all() {
    for (int64_t i = 0; i < static_cast<int64_t>(streams_.size()); ++i)
      flush(i);
  }

 private:
  /// Bytes that have not left yet: less than a line.
  struct Stream {
    std::byte* first = nullptr;
    int64_t bytes = 0;
  };

  std::byte* staged(int64_t stream_idx) { return staged_.data() + stream_idx * capacity_; }

  void flush(int64_t stream_idx) {
    Stream& stream = streams_[static_cast<size_t>(stream_idx)];
    if (stream.bytes > 0)
      kernels_.copy(staged(stream_idx), stream.first, stream.bytes, StoreMode::kStreaming);
    stream.bytes = 0;
  }

  const RowKernels& kernels_;
  int64_t row_bytes_;
  int64_t capacity_;
  std::vector<Stream> streams_;
  std::vector<std::byte> staged_;
};

/// Column-major scale factors: a row touches a line per block.
class ScaleColumnStage {
 public:
  ScaleColumnStage(const RowKernels& kernels,
                   int64_t num_streams,
                   int64_t num_scales,
                   int64_t scale_bytes)
      : kernels_(kernels),
        num_scales_(num_scales),
        scale_bytes_(scale_bytes),
        rows_per_line_(kStagedLineBytes / scale_bytes),
        streams_(static_cast<size_t>(num_streams)),
        staged_(static_cast<size_t>(num_streams * rows_per_line_ * num_scales * scale_bytes)) {}

  /// @param place  address of the row's factor 0; its others follow at multiples of @p step.
  void add(int64_t stream_idx, std::byte* place, int64_t step, const std::byte* scales) {
    Stream& stream = streams_[static_cast<size_t>(stream_idx)];
    if (stream.num_rows > 0 && place != stream.first + stream.num_rows * scale_bytes_)
      flush(stream_idx);
    if (stream.num_rows == 0) {
      stream.first = place;
      stream.step = step;
    }
    std::memcpy(
        row(stream_idx, stream.num_rows), scales, static_cast<size_t>(num_scales_ * scale_bytes_));
    ++stream.num_rows;
    const auto end = reinterpret_cast<uintptr_t>(place + scale_bytes_);
    if (stream.num_rows == rows_per_line_ || end % kStagedLineBytes == 0)
      flush(stream_idx);
  }

  void flush_all() {
    for (size_t i = 0; i < streams_.size(); ++i)
      flush(static_cast<int64_t>(i));
  }

 private:
  struct Stream {
    std::byte* first = nullptr;
    int64_t step = 0;
    int64_t num_rows = 0;
  };

  std::byte* row(int64_t stream_idx, int64_t row_idx) {
    return staged_.data() + (stream_idx * rows_per_line_ + row_idx) * num_scales_ * scale_bytes_;
  }

  void flush(int64_t stream_idx) {
    switch (scale_bytes_) {
      case 1:
        return flush_as<uint8_t>(stream_idx);
      case 2:
        return flush_as<uint16_t>(stream_idx);
      case 4:
        return flush_as<uint32_t>(stream_idx);
      default:
        return flush_as<uint64_t>(stream_idx);
    }
  }

  template <typename Word>
  void flush_as(int64_t stream_idx) {
    Stream& stream = streams_[static_cast<size_t>(stream_idx)];
    const std::byte* const first = row(stream_idx, 0);
    for (int64_t block = 0; block < num_scales_; ++block) {
      Word column[kStagedLineBytes / sizeof(Word)];
      for (int64_t i = 0; i < stream.num_rows; ++i)
        std::memcpy(&column[i],
                    first + (i * num_scales_ + block) * static_cast<int64_t>(sizeof(Word)),
                    sizeof(Word));
      kernels_.copy(reinterpret_cast<const std::byte*>(column),
                    stream.first + block * stream.step,
                    stream.num_rows * static_cast<int64_t>(sizeof(Word)),
                    StoreMode::kStreaming);
    }
    stream.num_rows = 0;
  }

  const RowKernels& kernels_;
  int64_t num_scales_;
  int64_t scale_bytes_;
  int64_t rows_per_line_;
  std::vector<Stream> streams_;
  std::vector<std::byte> staged_;
};

}  // namespace moe::cpu
