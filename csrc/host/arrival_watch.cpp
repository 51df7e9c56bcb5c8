#include "host/arrival_watch.h"

#include "host/warn.h"

namespace moe::host {

ArrivalWatch::ArrivalWatch(Group& group,
                           const WaitSite& site,
                           uint64_t buffer_number,
                           int peer_rank)
    : group_(group),
      site_(site),
      buffer_number_(buffer_number),
      peer_rank_(peer_rank),
      start_ns_(sync::now_ns()),
      warned_ns_(start_ns_) {}

void ArrivalWatch::check() {
  const int64_t now_ns = sync::now_ns();
  const char* const operation = layout::operation_name(site_.operation);
  if (now_ns - warned_ns_ > warning_interval_ns()) {
    warned_ns_ = now_ns;
    warn(concat("rank ",
                group_.rank_idx(),
                " has waited ",
                (now_ns - start_ns_) / 1'000'000'000,
                " s for rank ",
                peer_rank_,
                " to enter ",
                operation,
                " of buffer ",
                buffer_number_,
                ", epoch ",
                site_.epoch,
                group_.whereabouts(peer_rank_)));
  }
  if (now_ns - start_ns_ <= group_.arrival_timeout_ns())
    return;
  group_.abort(layout::AbortCause::kPeerTimeout,
               site_,
               {peer_rank_},
               concat("rank ",
                      peer_rank_,
                      " did not enter ",
                      operation,
                      " of buffer ",
                      buffer_number_,
                      " (epoch ",
                      site_.epoch,
                      ") within ",
                      static_cast<double>(group_.arrival_timeout_ns()) / 1e9,
                      " s of rank ",
                      group_.rank_idx(),
                      group_.whereabouts(peer_rank_)));
  group_.throw_abort();
}

}  // namespace moe::host
