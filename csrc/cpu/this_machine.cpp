#include "cpu/this_machine.h"

#include <algorithm>
#include <fstream>
#include <string_view>

#include "core/error.h"
#include "cpu/roof.h"
#include "cpu/row_kernels.h"

namespace moe::cpu {

namespace {

constexpr int64_t kDefaultCacheBytes = int64_t{32} << 20;

// sysconf(_SC_LEVEL3_CACHE_SIZE) adds up all caches of a socket.
int64_t read_last_level_cache_bytes() {
  int64_t largest = 0;
  for (int level = 0; level < 8; ++level) {
    std::ifstream file(concat("/sys/devices/system/cpu/cpu0/cache/index", level, "/size"));
    int64_t size = 0;
    char unit = ' ';
    if (!(file >> size))
      break;
    file >> unit;
    const int shift = unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0;
    largest = std::max(largest, size << shift);
  }
  return largest > 0 ? largest : kDefaultCacheBytes;
}

std::string_view find_best_name() {
  for (const std::string_view name : {"avx512", "avx2"})
    if (find_row_kernels(name))
      return name;
  return "portable";
}

std::string_view best_name() {
  static const std::string_view name = find_best_name();
  return name;
}

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = read_last_level_cache_bytes();
  return bytes;
}

const RowKernels& best_row_kernels() {
  static const RowKernels& best = *find_row_kernels(best_name());
  return best;
}

const RoofKernels& best_roof_kernels() {
  static const RoofKernels& best = *find_roof_kernels(best_name());
  return best;
}

}  // namespace moe::cpu
