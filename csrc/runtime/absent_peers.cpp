#include "runtime/absent_peers.h"

#include "core/text.h"

namespace moe::runtime {

void RowArrivals::check(group::Group& group,
                        const ControlMemory& control,
                        const group::WaitSite& site,
                        int64_t now_ns) {
  const auto is_missing = [&](int rank_idx) {
    return rank_idx != group.rank_idx() && group.is_active(rank_idx) &&
           !control.has_row(static_cast<uint64_t>(site.epoch), rank_idx);
  };
  int peer_rank = 0;
  while (peer_rank < group.num_ranks() && !is_missing(peer_rank))
    ++peer_rank;
  if (peer_rank == group.num_ranks()) {
    watch_.reset();
    return;
  }
  if (!watch_ || watch_->peer_rank() != peer_rank) {
    watch_.reset();  // which refers to the site
    site_ = site;
    watch_.emplace(group, site_, peer_rank, group::ArrivalWatch::kNoLimit);
  }
  watch_->check(now_ns, is_missing);
}

void give_up_timed_out(group::Group& group,
                       uint64_t buffer_number,
                       const kernels::WaitReport& report) {
  group::WaitSite where;
  where.operation = static_cast<layout::Operation>(report.operation);
  where.phase = static_cast<layout::Phase>(report.phase);
  where.epoch = static_cast<int64_t>(report.epoch);
  where.buffer_number = buffer_number;
  if (where.phase == layout::Phase::kRows)
    group::give_up_absent(group, where, report.peer_rank);
  group::give_up_stalled(
      group, where, report.peer_rank, group.stall_timeout_ns(), concat("rank ", report.peer_rank));
}

}  // namespace moe::runtime
