#include "nvshmem/world.h"

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"
#include "nvshmem/host_library.h"

namespace moe::nvshmem {
namespace {

constexpr size_t kAlignment = 4096;

struct Process {
  std::mutex mutex;
  std::shared_ptr<World> world;

  static Process& get() {
    static auto* instance = new Process;  // its memory outlives exit
    return *instance;
  }
};

void check(int code, const char* doing) {
  if (code != 0)
    throw NvshmemError(concat("NVSHMEM: ", doing, " failed with code ", code));
}

}  // namespace

std::string World::make_unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  check(host_library().get_unique_id(&id), "making a unique id");
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

bool World::exists() {
  const std::lock_guard lock(Process::get().mutex);
  return Process::get().world != nullptr;
}

std::shared_ptr<World> World::create(const std::shared_ptr<cuda::CudaDevice>& device,
                                     int rank_idx,
                                     int num_ranks,
                                     const std::string& unique_id) {
  Process& process = Process::get();
  const std::lock_guard lock(process.mutex);
  if (process.world == nullptr) {
    process.world.reset(new World(device, rank_idx, num_ranks, unique_id));
    return process.world;
  }
  const World& known = *process.world;
  MOE_CHECK(known.rank_idx_ == rank_idx && known.num_ranks_ == num_ranks,
            "this process is PE ",
            known.rank_idx_,
            " of ",
            known.num_ranks_,
            " already and cannot be PE ",
            rank_idx,
            " of ",
            num_ranks,
            ": NVSHMEM is initialized once in a process, and ranks are processes");
  MOE_CHECK(known.device_->device_idx() == device->device_idx(),
            "NVSHMEM uses cuda:",
            known.device_->device_idx(),
            " in this process, got cuda:",
            device->device_idx());
  return process.world;
}

World::World(const std::shared_ptr<cuda::CudaDevice>& device,
             int rank_idx,
             int num_ranks,
             const std::string& unique_id)
    : device_(device), rank_idx_(rank_idx), num_ranks_(num_ranks) {
  nvshmemx_uniqueid_t id;
  MOE_CHECK(unique_id.size() == sizeof id,
            "a unique id has ",
            sizeof id,
            " bytes, got ",
            unique_id.size());
  std::memcpy(&id, unique_id.data(), sizeof id);
  // NVSHMEM takes the device that is current.
  device->activate();
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  check(host_library().set_unique_id(rank_idx, num_ranks, &id, &attributes), "taking a unique id");
  const Version built = built_version();
  int provided = 0;
  // nvshmemx_init_attr() is this and exit() where it fails.
  check(nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED,
                             &provided,
                             NVSHMEMX_INIT_WITH_UNIQUEID,
                             &attributes,
                             {built.major, built.minor, built.patch}),
        "initializing by a unique id");
  // It reports success where ranks have met and nothing else worked; it would then try again at the
  // first allocation, and end the process.
  if (const int status = host_library().init_status(); status < NVSHMEM_STATUS_IS_INITIALIZED)
    throw NvshmemError(concat("NVSHMEM: ranks have met, and setting up device ",
                              device->device_idx(),
                              " failed (status ",
                              status,
                              "); NVSHMEM_DEBUG=INFO in the environment says why"));
}

std::string World::sharing() const {
  switch (host_library().init_status()) {
    case NVSHMEM_STATUS_LIMITED_MPG:
      return "limited";
    case NVSHMEM_STATUS_FULL_MPG:
      return "full";
    default:
      return "";
  }
}

std::shared_ptr<std::byte> World::allocate(group::Group& group,
                                           int64_t bytes,
                                           const group::InterruptCheck& interrupt_check) {
  MOE_CHECK(bytes > 0, "memory between nodes must have > 0 bytes, got ", bytes);
  MOE_CHECK(group.num_ranks() == num_ranks_ && group.rank_idx() == rank_idx_,
            "NVSHMEM's memory is that of all its PEs: this communicator's rank ",
            group.rank_idx(),
            " of ",
            group.num_ranks(),
            " is PE ",
            rank_idx_,
            " of ",
            num_ranks_);
  for (int peer_rank = 0; peer_rank < num_ranks_; ++peer_rank)
    MOE_CHECK(group.is_active(peer_rank),
              "NVSHMEM's memory is made by all PEs together, and rank ",
              peer_rank,
              " has failed");
  const std::vector<std::string> said = group.all_gather(pool_.describe(bytes), interrupt_check);
  device_->activate();
  int region_idx = RegionPool::choose(said);
  std::byte* data = nullptr;
  if (region_idx == RegionPool::kNone) {
    data = static_cast<std::byte*>(host_library().align(kAlignment, static_cast<size_t>(bytes)));
    // NVSHMEM allocates in step, so all ranks learn here whether each has it.
    const bool has_memory = data != nullptr;
    const auto outcomes = group.all_gather(std::string(1, has_memory ? '1' : '0'), interrupt_check);
    for (size_t peer_rank = 0; peer_rank < outcomes.size(); ++peer_rank)
      if (outcomes[peer_rank] != "1")
        throw CapacityError(concat("rank ",
                                   peer_rank,
                                   " has no ",
                                   bytes,
                                   " bytes more of NVSHMEM's symmetric memory, whose limit is "
                                   "NVSHMEM_SYMMETRIC_SIZE where that is set"),
                            static_cast<uint64_t>(bytes),
                            0);
    region_idx = pool_.add(data, bytes);
  } else {
    data = pool_.take(region_idx);
  }
  std::shared_ptr<std::byte> region(data, [self = shared_from_this(), region_idx](std::byte*) {
    self->pool_.give_back(region_idx);
  });
  device_->pool().fill(data, 0, pool_.bytes(region_idx));
  group.all_gather("zeroed", interrupt_check);
  return region;
}

}  // namespace moe::nvshmem
