#include "runtime/device_copies.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/math.h"
#include "runtime/device_memory.h"

namespace moe::runtime {

using kernels::StridedCopiesParams;
using kernels::StridedCopy;

namespace {

constexpr int kNumWarps = kernels::kMaxStridedCopyThreads / 32;

/// Small enough that all warps have as much to do, large enough that they seldom look for more.
int64_t piece_bytes_of(int64_t bytes, int num_blocks) {
  constexpr int64_t kLeast = int64_t{16} << 10;
  constexpr int64_t kMost = int64_t{1} << 20;
  constexpr int64_t kPiecesPerWarp = 4;
  const int64_t share = bytes / (int64_t{num_blocks} * kNumWarps * kPiecesPerWarp);
  return round_up(std::clamp(share, kLeast, kMost), kLeast);
}

}  // namespace

void strided_copies(Device& device,
                    Stream& stream,
                    const std::vector<StridedCopy>& copies,
                    int num_sms) {
  int num_blocks = num_sms > 0 ? num_sms : device.num_sms();
  int64_t bytes = 0;
  for (const StridedCopy& copy : copies)
    bytes += copy.source_shape.bytes;
  if (bytes == 0)
    return;
  MOE_CHECK(
      !stream.is_capturing(),
      "strided copies cannot be captured: their tables are kept until the stream has done them "
      "once");
  device.activate();
  StridedCopiesParams params;
  params.num_copies = static_cast<int64_t>(copies.size());
  params.piece_bytes = piece_bytes_of(bytes, num_blocks);
  params.is_plain = device.has_bulk_copies() ? 0 : 1;

  StridedCopy* copy_table = nullptr;
  int64_t* first_piece = nullptr;
  const auto lay = [&](Suballocator suballocator) {
    copy_table = suballocator.take<StridedCopy>(params.num_copies);
    first_piece = suballocator.take<int64_t>(params.num_copies + 1);
    return suballocator.bytes();
  };
  const int64_t table_bytes = lay(Suballocator(nullptr));
  // Both are kept until the stream is done with them, whichever thread drops them.
  const auto staging = device.allocate_host(table_bytes);
  const auto tables = device.allocate_unset(table_bytes);
  lay(Suballocator(staging.get()));
  std::copy(copies.begin(), copies.end(), copy_table);
  first_piece[0] = 0;
  for (size_t i = 0; i < copies.size(); ++i)
    first_piece[i + 1] =
        first_piece[i] + kernels::num_pieces(copies[i].source_shape.bytes, params.piece_bytes);
  const int64_t num_pieces = first_piece[copies.size()];
  lay(Suballocator(tables.get()));
  stream.copy(tables.get(), staging.get(), table_bytes);
  params.copies = copy_table;
  params.first_piece = first_piece;

  device::Launch launch;
  launch.num_blocks =
      static_cast<int>(std::min<int64_t>(num_blocks, (num_pieces + kNumWarps - 1) / kNumWarps));
  launch.num_threads = kernels::kMaxStridedCopyThreads;
  fit_shared_memory(device, launch, [&](int num_threads) {
    return kernels::strided_copies_shared_bytes(params, num_threads);
  });
  launch.stream = stream.handle();
  kernels::launch_strided_copies(launch, params);
}

}  // namespace moe::runtime
