#include "host/arrival_watch.h"

#include "host/warn.h"

namespace moe::host {

std::string describe_absence(const Group& group,
                             const WaitSite& site,
                             uint64_t buffer_number,
                             int peer_rank,
                             int64_t waited_ns) {
  return concat("rank ",
                group.rank_idx(),
                " has waited ",
                waited_ns / 1'000'000'000,
                " s for rank ",
                peer_rank,
                " to enter ",
                layout::operation_name(site.operation),
                " of buffer ",
                buffer_number,
                ", epoch ",
                site.epoch,
                group.location(peer_rank));
}

void give_up_absent(Group& group, const WaitSite& site, uint64_t buffer_number, int peer_rank) {
  group.abort(layout::AbortCause::kPeerTimeout,
              site,
              {peer_rank},
              concat("rank ",
                     peer_rank,
                     " did not enter ",
                     layout::operation_name(site.operation),
                     " of buffer ",
                     buffer_number,
                     " (epoch ",
                     site.epoch,
                     ") within ",
                     static_cast<double>(group.arrival_timeout_ns()) / 1e9,
                     " s of rank ",
                     group.rank_idx(),
                     group.location(peer_rank)));
  group.throw_abort();
}

void give_up_stalled(
    Group& group, const WaitSite& site, uint64_t buffer_number, int culprit, int peer_rank) {
  group.abort(layout::AbortCause::kPeerTimeout,
              site,
              {culprit},
              concat("rank ",
                     culprit,
                     " made no progress for ",
                     static_cast<double>(group.stall_timeout_ns()) / 1e9,
                     " s in ",
                     layout::operation_name(site.operation),
                     " of buffer ",
                     buffer_number,
                     ", epoch ",
                     site.epoch,
                     ", phase ",
                     layout::phase_name(site.phase),
                     "; rank ",
                     group.rank_idx(),
                     " waited for rank ",
                     peer_rank));
  group.throw_abort();
}

ArrivalWatch::ArrivalWatch(Group& group,
                           const WaitSite& site,
                           uint64_t buffer_number,
                           int peer_rank)
    : group_(group),
      site_(site),
      buffer_number_(buffer_number),
      peer_rank_(peer_rank),
      start_ns_(sync::now_ns()),
      warned_ns_(start_ns_),
      circle_(group, site, buffer_number, static_cast<uint64_t>(site.epoch), peer_rank) {}

void ArrivalWatch::check(const std::function<bool(int)>& is_missing) {
  const int64_t now_ns = sync::now_ns();
  circle_.check(now_ns, is_missing);
  if (now_ns - warned_ns_ > warning_interval_ns()) {
    warned_ns_ = now_ns;
    warn(describe_absence(group_, site_, buffer_number_, peer_rank_, now_ns - start_ns_));
  }
  if (now_ns - start_ns_ > group_.arrival_timeout_ns())
    give_up_absent(group_, site_, buffer_number_, peer_rank_);
}

}  // namespace moe::host
