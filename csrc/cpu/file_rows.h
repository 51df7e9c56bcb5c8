#pragma once

#include <cstddef>
#include <cstdint>

namespace moe::cpu {

/// Runs of neighbors in a file that follow each other at one distance.
struct FileRows {
  int64_t offset = 0;  ///< start of the first run, in bytes
  int64_t num_runs = 0;
  int64_t run_bytes = 0;  ///< > 0
  int64_t step = 0;       ///< distance from one to the next; run_bytes or more

  /// Behind the last run.
  int64_t stop() const {
    return num_runs == 0 ? offset : offset + (num_runs - 1) * step + run_bytes;
  }
};

/// When runs are read with what lies between them, as that takes less than a call for each.
struct RowLimits {
  int64_t cached_bytes = 0;   ///< read at a time: what stays in a core's own cache
  int64_t max_gap_bytes = 0;  ///< most bytes between two runs
};

/// Reads runs, one behind the other, to @p memory. Many that are read with their gaps are stored
/// past the caches.
/// @return -1, or the byte at which the file ends, before stop().
/// @throws SystemError
int64_t read_file_rows(int descriptor,
                       const FileRows& rows,
                       std::byte* memory,
                       const RowLimits& limits);

/// Has the system begin to write to the disk what it holds of a part of a file, so that a later
/// fsync() has less to wait for. Where it cannot, nothing is different.
void begin_writeback(int descriptor, int64_t offset, int64_t bytes);

/// Makes an empty file as long as it will be, with its place on the disk where the file system can
/// say so.
/// @throws SystemError
void reserve_file(int descriptor, int64_t bytes);

}  // namespace moe::cpu
