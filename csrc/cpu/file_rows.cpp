#include "cpu/file_rows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/math.h"
#include "core/process.h"
#include "cpu/row_kernels.h"
#include "cpu/strided_copy.h"

namespace moe::cpu {

namespace {

/// Read at a time: what is made for it is still near when it is filled.
constexpr int64_t kPartBytes = int64_t{1} << 20;

/// Makes the pages of memory that was never touched.
void make_pages(std::byte* memory, int64_t bytes) {
  const auto page_bytes = static_cast<int64_t>(system_page_bytes());
  const auto address = reinterpret_cast<int64_t>(memory);
  const int64_t lead = round_up(address, page_bytes) - address;
  const int64_t num_pages = (bytes - lead) / page_bytes;
  unsigned char is_there = 1;
  if (num_pages <= 0 || mincore(memory + lead, static_cast<size_t>(page_bytes), &is_there) != 0)
    return;
  if ((is_there & 1) == 0)
    map_pages(memory + lead, static_cast<uint64_t>(num_pages * page_bytes));
}

/// @return -1, or the byte at which the file ends.
int64_t read_all(int descriptor, std::byte* memory, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const int64_t part = std::min(bytes, kPartBytes);
    make_pages(memory, part);
    const ssize_t count = pread(descriptor, memory, static_cast<size_t>(part), offset);
    if (count == 0)
      return offset;
    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      throw SystemError(std::strerror(errno), errno);
    memory += count;
    bytes -= count;
    offset += count;
  }
  return -1;
}

}  // namespace

int64_t read_file_rows(int descriptor,
                       const FileRows& rows,
                       std::byte* memory,
                       const RowLimits& limits) {
  if (rows.num_runs == 1 || rows.step == rows.run_bytes)
    return read_all(descriptor, memory, rows.num_runs * rows.run_bytes, rows.offset);
  const bool is_read_whole =
      rows.step <= limits.cached_bytes && rows.step - rows.run_bytes <= limits.max_gap_bytes;
  const int64_t most = is_read_whole ? std::min(limits.cached_bytes / rows.step, rows.num_runs) : 1;
  std::vector<std::byte> whole(is_read_whole ? most * rows.step : 0);
  const RowKernels& kernels = best_row_kernels();
  const StoreMode mode = store_mode_of_reads(rows.num_runs * rows.run_bytes);
  for (int64_t first = 0; first < rows.num_runs; first += most) {
    FileRows some = rows;
    some.offset += first * rows.step;
    some.num_runs = std::min(most, rows.num_runs - first);
    const int64_t kept_bytes = some.num_runs * rows.run_bytes;
    std::byte* const kept = memory + first * rows.run_bytes;
    std::byte* const read = is_read_whole ? whole.data() : kept;
    const int64_t end = read_all(descriptor, read, some.stop() - some.offset, some.offset);
    if (end >= 0)
      return end;
    if (!is_read_whole)
      continue;
    make_pages(kept, kept_bytes);
    const layout::StridedBytes shape{kept_bytes, rows.run_bytes, 1, {some.num_runs}, {rows.step}};
    const Place place{read, some.num_runs > 1 ? &shape : nullptr};
    copy_strided(kernels, place, 0, Place{kept, nullptr}, 0, kept_bytes, mode);
  }
  kernels.store_fence();
  return -1;
}

void begin_writeback(int descriptor, int64_t offset, int64_t bytes) {
  sync_file_range(descriptor, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void reserve_file(int descriptor, int64_t bytes) {
  // An empty file has nothing to reserve, which fallocate() refuses.
  if (bytes > 0 && fallocate(descriptor, 0, 0, bytes) == 0)
    return;
  const bool is_full = bytes > 0 && (errno == ENOSPC || errno == EDQUOT);
  if (is_full || ftruncate(descriptor, bytes) != 0)
    throw SystemError(std::strerror(errno), errno);
}

}  // namespace moe::cpu
