#include "group/peer_wait.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "group/warn.h"

namespace moe::group {

namespace {

/// Asks @p rank_idx which rank it waits for in the operation of @p site.
/// @return -1 for none; nullopt without an answer: the rank is stopped or gone.
std::optional<int> ask_awaited(Peers& peers, const WaitSite& site, int rank_idx) {
  const uint64_t question = peers.mail().ask_awaited(rank_idx, site.buffer_number);
  const int64_t end_ns = sync::now_ns() + std::max(kLeastAnswerNs, peers.stall_timeout_ns() / 10);
  std::optional<int> awaited_rank;
  await_peer(
      peers,
      site,
      [&] {
        if (!awaited_rank)
          awaited_rank = peers.mail().take_answer(rank_idx, question);
        return awaited_rank.has_value() || peers.state(rank_idx) != PeerState::kAlive ||
               sync::now_ns() >= end_ns;
      },
      [](int64_t) {});  // ready() ends it at end_ns: no answer is a result, not an error
  return awaited_rank;
}

double seconds(int64_t duration_ns) {
  return static_cast<double>(duration_ns) / 1e9;
}

}  // namespace

void answer_caller(const Membership& ranks, const WaitSite& site) {
  if (site.interrupt_check != nullptr && *site.interrupt_check)
    (*site.interrupt_check)();
  ranks.check_process(site.operation == layout::Operation::kNone
                          ? site.call
                          : layout::operation_name(site.operation));
}

void give_up_gone(Peers& peers, const WaitSite& site, int peer_rank, const char* awaited) {
  peers.abort(layout::AbortCause::kPeerFailed,
              site,
              {peer_rank},
              concat(peers.end_of(peer_rank),
                     " while rank ",
                     peers.rank_idx(),
                     " waited ",
                     awaited == nullptr ? "" : concat("for ", awaited, " "),
                     "(",
                     site.describe(),
                     ")"));
  peers.throw_abort();
}

std::string describe_absence(const Membership& ranks,
                             int peer_rank,
                             const std::string& deed,
                             int64_t limit_ns) {
  return concat("rank ",
                peer_rank,
                " did not ",
                deed,
                " within ",
                seconds(limit_ns),
                " s of rank ",
                ranks.rank_idx());
}

void give_up_absent(Peers& peers, const WaitSite& site, int peer_rank) {
  peers.abort(layout::AbortCause::kPeerTimeout,
              site,
              {peer_rank},
              describe_absence(peers, peer_rank, site.entrance(), peers.arrival_timeout_ns()) +
                  peers.location(peer_rank));
  peers.throw_abort();
}

bool ArrivalClock::is_warning_due(int64_t now_ns) const {
  return now_ns - warned_ns_ > warning_interval_ns();
}

void ArrivalClock::warn_of(const Membership& ranks,
                           int64_t now_ns,
                           int peer_rank,
                           const std::string& deed) {
  warned_ns_ = now_ns;
  warn(concat("rank ",
              ranks.rank_idx(),
              " has waited ",
              (now_ns - start_ns_) / 1'000'000'000,
              " s for rank ",
              peer_rank,
              " to ",
              deed));
}

void ArrivalWatch::check(int64_t now_ns, const std::function<bool(int)>& is_missing) {
  circle_.check(now_ns, is_missing);
  if (clock_.has_run_out(peers_, now_ns, peer_rank_, [this] {
        return site_.entrance() + peers_.location(peer_rank_);
      }))
    give_up_absent(peers_, site_, peer_rank_);
}

std::string describe_stall(const Membership& ranks,
                           const WaitSite& site,
                           int culprit,
                           int64_t limit_ns,
                           const std::string& awaited) {
  return concat("rank ",
                culprit,
                " made no progress for ",
                seconds(limit_ns),
                " s in ",
                site.describe(),
                "; rank ",
                ranks.rank_idx(),
                " waited for ",
                awaited);
}

void give_up_stalled(
    Peers& peers, const WaitSite& site, int culprit, int64_t limit_ns, const std::string& awaited) {
  peers.abort(layout::AbortCause::kPeerTimeout,
              site,
              {culprit},
              describe_stall(peers, site, culprit, limit_ns, awaited));
  peers.throw_abort();
}

int find_culprit(Peers& peers, const WaitSite& site, int peer_rank) {
  int culprit = peer_rank;
  std::vector<uint8_t> has_asked(static_cast<size_t>(peers.num_ranks()));
  has_asked[peers.own_idx()] = 1;
  while (true) {
    has_asked[static_cast<size_t>(culprit)] = 1;
    const std::optional<int> next = ask_awaited(peers, site, culprit);
    if (!next || *next < 0 || *next >= peers.num_ranks() || has_asked[static_cast<size_t>(*next)])
      return culprit;
    culprit = *next;
  }
}

}  // namespace moe::group
