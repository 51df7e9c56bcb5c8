#include "runtime/segment_bases.h"

#include "core/sync.h"
#include "kernels/buffer.h"

namespace moe::runtime {

using kernels::Buffer;

SegmentBases::SegmentBases(std::shared_ptr<group::Group> group,
                           std::shared_ptr<SymmetricMemory> memory,
                           Device& device)
    : group_(std::move(group)),
      memory_(std::move(memory)),
      table_(device.allocate_host(int64_t{8} * Buffer::kMaxSegments * group_->num_ranks())),
      found_(device.allocate(int64_t{8} * Buffer::kMaxSegments * group_->num_ranks())),
      num_known_(static_cast<size_t>(group_->num_ranks())),
      listener_id_(group_->link()->add_listener([this] { refresh_from_link(); })) {}

SegmentBases::~SegmentBases() {
  group_->link()->remove_listener(listener_id_);
}

void SegmentBases::refresh() {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto* const entries = reinterpret_cast<uint64_t*>(table_.get());
  for (int rank_idx = 0; rank_idx < group_->num_ranks(); ++rank_idx) {
    if (!group_->is_local(rank_idx))
      continue;
    uint32_t& num_known = num_known_[static_cast<size_t>(rank_idx)];
    const int link_rank = group_->members()[static_cast<size_t>(rank_idx)];
    while (std::byte* const base = memory_->try_resolve(link_rank, Offer{num_known, 0, 0, 1})) {
      if (num_known == Buffer::kMaxSegments)
        throw CapacityError(concat("the heap of rank ",
                                   rank_idx,
                                   " has more than ",
                                   Buffer::kMaxSegments,
                                   " segments, as many as kernels address: reserve() more at once"),
                            0,
                            0);
      sync::store_release(entries[rank_idx * Buffer::kMaxSegments + static_cast<int>(num_known)],
                          reinterpret_cast<uint64_t>(base));
      ++num_known;
    }
  }
}

void SegmentBases::refresh_from_link() noexcept {
  try {
    refresh();
  } catch (const std::exception& error) {
    // A kernel may wait for the entry: it leaves by the abort, which says why.
    group_->abort(layout::AbortCause::kPeerFailed,
                  group::WaitSite{},
                  {group_->rank_idx()},
                  concat("rank ",
                         group_->rank_idx(),
                         " cannot reach memory that a peer announced: ",
                         error.what()));
  }
}

}  // namespace moe::runtime
