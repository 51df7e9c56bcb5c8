#pragma once

#include <nvshmem_host.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace moe::nvshmem {

/// NVSHMEM could not do what was asked of it.
class NvshmemError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// major.minor.patch
struct Version {
  int major = 0;
  int minor = 0;
  int patch = 0;

  std::string text() const;
};

/// The NVSHMEM that kernels of this module are linked with.
Version built_version();

/// Loads NVSHMEM's host library; nothing of it is needed before. Once a process: later calls name
/// the same file. Initializes nothing and needs no driver.
/// @param path  Path of libnvshmem_host.so.3, or its name alone for the system's search.
/// @throws NvshmemError  it is not there, or is of another version than kernels were linked with:
///   host and device code of NVSHMEM share data whose shape is theirs alone.
Version load_host_library(const std::string& path);

/// Functions of the host library that are used. Valid once it is loaded.
struct HostLibrary {
  decltype(&nvshmemx_vendor_get_version_info) get_version;
  decltype(&nvshmemx_get_uniqueid) get_unique_id;
  decltype(&nvshmemx_set_attr_uniqueid_args) set_unique_id;
  decltype(&nvshmem_align) align;
  decltype(&nvshmem_barrier_all) barrier_all;
  // Functions that the part of NVSHMEM that is linked in asks of it.
  decltype(&nvshmemid_hostlib_init_attr) init;
  decltype(&nvshmemid_hostlib_finalize) finalize;
  decltype(&nvshmemid_init_status) init_status;
  const int* device_transport;  ///< a variable; null in versions that have none
};

/// @throws NvshmemError  load_host_library() has not been called.
const HostLibrary& host_library();

}  // namespace moe::nvshmem
