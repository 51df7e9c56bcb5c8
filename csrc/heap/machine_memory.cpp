#include "heap/machine_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "core/error.h"
#include "core/process.h"

namespace moe::heap {
namespace {

// Left to the rest of the machine when a segment takes nearly all of it.
constexpr uint64_t kSpareBytes = uint64_t{32} << 20;

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

/// First line of a file as a number; "max", a missing file or anything else is kUnknown.
uint64_t read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : kUnknown;
}

/// The number behind @p key in a file of "key value" lines.
uint64_t read_key(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  std::string rest;
  while (file >> name >> value) {
    if (name == key)
      return value;
    std::getline(file, rest);
  }
  return kUnknown;
}

struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  ///< key in memory.stat: page cache that goes before anybody is killed
};

constexpr GroupFiles kVersion1{
    "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2{"/memory.max", "/memory.current", "inactive_file"};

uint64_t group_leaves(const std::string& directory, const GroupFiles& files) {
  const uint64_t limit = read_number(directory + files.limit);
  const uint64_t usage = read_number(directory + files.usage);
  if (limit == kUnknown || usage == kUnknown)
    return kUnknown;
  const uint64_t cache = read_key(directory + "/memory.stat", files.reclaimable);
  const uint64_t held = usage - std::min(usage, cache == kUnknown ? 0 : cache);
  return limit - std::min(limit, held);
}

/// Least of what @p path and every group above it leaves. In a container the path may not be
/// visible; then the walk ends at the root of the mount, which is the container's own group.
uint64_t groups_leave(const std::string& mount, std::string path, const GroupFiles& files) {
  uint64_t least = group_leaves(mount, files);
  while (path.size() > 1) {
    least = std::min(least, group_leaves(mount + path, files));
    path.erase(path.rfind('/'));
  }
  return least;
}

}  // namespace

uint64_t machine_available_bytes() {
  const uint64_t free_kib = read_key("/proc/meminfo", "MemAvailable:");
  uint64_t least = free_kib == kUnknown ? kUnknown : free_kib * 1024;
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // "hierarchy:controller,controller:path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos)
      continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,")
      least = std::min(least, groups_leave("/sys/fs/cgroup", path, kVersion2));
    else if (controllers.find(",memory,") != std::string::npos)
      least = std::min(least, groups_leave("/sys/fs/cgroup/memory", path, kVersion1));
  }
  return least;
}

void throw_capacity(uint64_t bytes, const std::string& cause, uint64_t limit_bytes) {
  const uint64_t available = machine_available_bytes();
  throw CapacityError(concat("cannot get ",
                             bytes,
                             " bytes of shared memory: ",
                             cause,
                             "; the machine has ",
                             available,
                             " bytes available"),
                      bytes,
                      std::min(available, limit_bytes));
}

void throw_refused(uint64_t bytes, const char* call, int error) {
  const std::string cause = concat(call, " failed: ", std::strerror(error));
  if (error == EMFILE || error == ENFILE)
    throw SystemError(concat("cannot make a segment of ", bytes, " bytes: ", cause), error);
  throw_capacity(bytes, cause + describe_address_space(), address_space_left_bytes());
}

void check_machine(uint64_t bytes) {
  const uint64_t available = machine_available_bytes();
  if (available < kSpareBytes || bytes > available - kSpareBytes)
    throw_capacity(bytes, concat(kSpareBytes, " bytes must stay free"));
}

}  // namespace moe::heap
