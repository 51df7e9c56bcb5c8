#include "runtime/internode.h"

#include "core/error.h"
#include "layout/gpu_rail_chunks.h"

namespace moe::runtime {

Internode::Internode(group::Group& group,
                     Device& device,
                     const InternodeConfig& config,
                     int num_experts,
                     int depth,
                     const group::InterruptCheck& interrupt_check)
    : kernels_(config.kernels), largest_(config.largest) {
  rails_.nodes = group.nodes();
  rails_.map = layout::rail_region(largest_, rails_.nodes, num_experts, depth);
  rails_.tokens_per_chunk = layout::rail_tokens_per_chunk(largest_.num_max_tokens);
  const int num_ranks = group.num_ranks();
  region_ = config.regions->allocate(group, rails_.map.bytes, interrupt_check);
  rails_.region = region_.get();
  pes_staging_ = device.allocate_host(4 * int64_t{num_ranks});
  pes_ = device.allocate(4 * int64_t{num_ranks});
  auto* const pes = reinterpret_cast<int32_t*>(pes_staging_.get());
  for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx)
    pes[rank_idx] = rank_idx;
  rails_.pes = reinterpret_cast<const int32_t*>(pes_.get());
}

void Internode::upload(Stream& stream) const {
  stream.copy(pes_.get(), pes_staging_.get(), 4 * int64_t{rails_.nodes.num_ranks});
}

std::string Internode::find_shortage(int64_t needed_bytes,
                                     int64_t num_tokens,
                                     int64_t row_bytes) const {
  if (needed_bytes <= rails_.map.area_bytes &&
      rails_.num_chunks(num_tokens) <= rails_.map.num_max_chunks)
    return "";
  return concat(num_tokens,
                " tokens with rows of ",
                row_bytes,
                " bytes take ",
                needed_bytes,
                " bytes of the memory between nodes; this buffer was made with ",
                rails_.map.area_bytes,
                ", for ",
                largest_.num_max_tokens,
                " tokens with rows of ",
                largest_.max_row_bytes,
                " bytes, and cannot make more: make one for larger rows");
}

}  // namespace moe::runtime
