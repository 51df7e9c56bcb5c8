#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/cuda_device.h"
#include "nvshmem/region_pool.h"
#include "runtime/symmetric_regions.h"

namespace moe::nvshmem {

/// This process among NVSHMEM's processing elements (PEs): rank i of a communicator is PE i.
///
/// There is one in a process, and it stays for the process's life: NVSHMEM ends only by a barrier
/// of all PEs, which a dead one would hold up for ever. Communicators made later over the same
/// ranks take it over, with the memory that earlier ones gave back.
class World final : public runtime::SymmetricRegions, public std::enable_shared_from_this<World> {
 public:
  /// Id of rank 0 that every rank is told before create(): where PEs meet. Says nothing of MPI
  /// or of a process manager.
  static std::string make_unique_id();

  /// Initializes NVSHMEM on @p device, or takes over what is. Collective over all ranks.
  /// @throws InvalidArgument  this process is another PE already.
  /// @throws NvshmemError     NVSHMEM refused.
  static std::shared_ptr<World> create(const std::shared_ptr<cuda::CudaDevice>& device,
                                       int rank_idx,
                                       int num_ranks,
                                       const std::string& unique_id);

  /// Returns whether create() would take over.
  static bool exists();

  int rank_idx() const { return rank_idx_; }
  int num_ranks() const { return num_ranks_; }
  /// Way in which PEs share a GPU: "" where none do; "limited" in turns, without MPS; "full" side
  /// by side.
  std::string sharing() const;

  std::shared_ptr<std::byte> allocate(group::Group& group,
                                      int64_t bytes,
                                      const group::InterruptCheck& interrupt_check) override;

 private:
  World(const std::shared_ptr<cuda::CudaDevice>& device,
        int rank_idx,
        int num_ranks,
        const std::string& unique_id);

  std::shared_ptr<cuda::CudaDevice> device_;
  int rank_idx_;
  int num_ranks_;
  RegionPool pool_;
};

}  // namespace moe::nvshmem
