#include "cpu/machine_cache.h"

#include <algorithm>
#include <fstream>

#include "core/error.h"
#include "core/sync.h"

namespace moe::host {

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

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = read_last_level_cache_bytes();
#if defined(MOE_SIMT_CHECKED)
  return sync::checked::cache_bytes(bytes);
#else
  return bytes;
#endif
}

}  // namespace moe::host
