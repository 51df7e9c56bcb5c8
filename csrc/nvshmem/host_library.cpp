#include "nvshmem/host_library.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <type_traits>

#include "core/error.h"

namespace moe::nvshmem {
namespace {

struct Loaded {
  std::string path;
  Version version;
  HostLibrary functions{};
};

std::mutex mutex;

/// Set once; what it holds is never unloaded, because NVSHMEM has threads of its own.
std::optional<Loaded>& loaded() {
  static auto* instance = new std::optional<Loaded>;
  return *instance;
}

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  if (*function == nullptr)
    throw NvshmemError(concat("NVSHMEM's host library ", path, " has no ", name));
}

HostLibrary find_all(void* library, const std::string& path) {
  HostLibrary found{};
  find(library, path, "nvshmemx_vendor_get_version_info", &found.get_version);
  find(library, path, "nvshmemx_get_uniqueid", &found.get_unique_id);
  find(library, path, "nvshmemx_set_attr_uniqueid_args", &found.set_unique_id);
  find(library, path, "nvshmem_align", &found.align);
  find(library, path, "nvshmem_barrier_all", &found.barrier_all);
  find(library, path, "nvshmemid_hostlib_init_attr", &found.init);
  find(library, path, "nvshmemid_hostlib_finalize", &found.finalize);
  find(library, path, "nvshmemid_init_status", &found.init_status);
  found.device_transport =
      static_cast<const int*>(::dlsym(library, "nvshmem_selected_device_transport"));
  return found;
}

}  // namespace

std::string Version::text() const {
  return concat(major, ".", minor, ".", patch);
}

Version built_version() {
  return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
}

Version load_host_library(const std::string& path) {
  const std::lock_guard lock(mutex);
  std::optional<Loaded>& known = loaded();
  if (known) {
    if (known->path != path)
      throw NvshmemError(
          concat("this process uses the NVSHMEM of ", known->path, ", asked for that of ", path));
    return known->version;
  }
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw NvshmemError(concat("NVSHMEM's host library cannot be loaded: ", ::dlerror()));
  Loaded found;
  found.path = path;
  try {
    // First: another version need not have the rest.
    find(library, path, "nvshmemx_vendor_get_version_info", &found.functions.get_version);
    found.functions.get_version(&found.version.major, &found.version.minor, &found.version.patch);
    const Version built = built_version();
    if (found.version.major != built.major || found.version.minor != built.minor)
      throw NvshmemError(concat("NVSHMEM's host library ",
                                path,
                                " is version ",
                                found.version.text(),
                                "; kernels were linked with version ",
                                built.text(),
                                ", and both must have the same major and minor number"));
    found.functions = find_all(library, path);
  } catch (...) {
    ::dlclose(library);
    throw;
  }
  known = std::move(found);
  return known->version;
}

const HostLibrary& host_library() {
  const std::optional<Loaded>& known = loaded();
  if (!known)
    throw NvshmemError("NVSHMEM's host library has not been loaded");
  return known->functions;
}

}  // namespace moe::nvshmem

// The part of NVSHMEM that is linked in with the kernels uses these of the host library, by name.
// Defined here they make it no dependency of the module, which loads without it.

namespace {

nvshmemx_device_lib_init_cb linked_on_init = nullptr;

}  // namespace

extern "C" {

/// The host library's variable of that name, as it was when it last called back.
int nvshmem_selected_device_transport = 0;

/// Returns what the callback returns: a status, in NVSHMEM 3.4 nothing.
static std::invoke_result_t<nvshmemx_device_lib_init_cb, void**, void**> on_init(
    void** device_state, void** transport_state) {
  if (const int* const chosen = moe::nvshmem::host_library().device_transport)
    nvshmem_selected_device_transport = *chosen;
  return linked_on_init(device_state, transport_state);
}

int nvshmemid_hostlib_init_attr(int requested,
                                int* provided,
                                unsigned bootstrap_flags,
                                nvshmemx_init_attr_t* attributes,
                                nvshmemi_version_t device_version,
                                nvshmemx_device_lib_init_cb callback) {
  linked_on_init = callback;
  return moe::nvshmem::host_library().init(
      requested, provided, bootstrap_flags, attributes, device_version, on_init);
}

void nvshmemid_hostlib_finalize(void* device_context, void* transport_context) {
  moe::nvshmem::host_library().finalize(device_context, transport_context);
}

int nvshmemid_init_status() {
  return moe::nvshmem::host_library().init_status();
}

}  // extern "C"
