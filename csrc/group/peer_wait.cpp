#include "group/peer_wait.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "group/warn.h"

namespace moe::group {

namespace {

/// "dispatch of buffer 3, epoch 7"
std::string name_of(const WaitSite& site) {
  if (site.operation == layout::Operation::kNone)
    return site.call;
  return concat(layout::operation_name(site.operation),
                " of buffer ",
                site.buffer_number,
                ", epoch ",
                site.epoch);
}

/// "dispatch of buffer 3, epoch 7, phase data"
std::string describe(const WaitSite& site) {
  if (site.operation == layout::Operation::kNone)
    return site.call;
  return concat(name_of(site), ", phase ", layout::phase_name(site.phase));
}

// The service thread of a rank that runs answers at once, where it gets a core.
constexpr int64_t kLeastAnswerNs = 1'000'000'000;

/// Whom a rank waits for in the operation of @p site, -1 for nobody; nothing where there is no
/// answer: it is stopped, or gone.
std::optional<int> ask_awaited(Group& group, const WaitSite& site, int rank_idx) {
  const uint64_t question = group.mail().ask_awaited(rank_idx, site.buffer_number);
  const int64_t end_ns = sync::now_ns() + std::max(kLeastAnswerNs, group.stall_timeout_ns() / 10);
  std::optional<int> awaited_rank;
  await_peer(
      group,
      site,
      [&] {
        if (!awaited_rank)
          awaited_rank = group.mail().take_answer(rank_idx, question);
        return awaited_rank.has_value() || group.state(rank_idx) != PeerState::kAlive ||
               sync::now_ns() >= end_ns;
      },
      [](int64_t) {});  // its end is a limit of its own, and no answer is one
  return awaited_rank;
}

double seconds(int64_t duration_ns) {
  return static_cast<double>(duration_ns) / 1e9;
}

}  // namespace

void answer_caller(const Group& group, const WaitSite& site) {
  if (site.interrupt_check != nullptr && *site.interrupt_check)
    (*site.interrupt_check)();
  group.check_process(site.operation == layout::Operation::kNone
                          ? site.call
                          : layout::operation_name(site.operation));
}

void give_up_gone(Group& group, const WaitSite& site, int peer_rank, const char* awaited) {
  group.abort(layout::AbortCause::kPeerFailed,
              site,
              {peer_rank},
              concat(group.end_of(peer_rank),
                     " while rank ",
                     group.rank_idx(),
                     " waited ",
                     awaited == nullptr ? "" : concat("for ", awaited, " "),
                     "(",
                     describe(site),
                     ")"));
  group.throw_abort();
}

std::string entrance(const WaitSite& site) {
  return concat(site.operation == layout::Operation::kNone ? "arrive at " : "enter ",
                name_of(site));
}

std::string describe_absence(const Group& group,
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
                group.rank_idx());
}

void give_up_absent(Group& group, const WaitSite& site, int peer_rank) {
  group.abort(layout::AbortCause::kPeerTimeout,
              site,
              {peer_rank},
              describe_absence(group, peer_rank, entrance(site), group.arrival_timeout_ns()) +
                  group.location(peer_rank));
  group.throw_abort();
}

bool ArrivalClock::is_warning_due(int64_t now_ns) const {
  return now_ns - warned_ns_ > warning_interval_ns();
}

void ArrivalClock::warn_of(const Group& group,
                           int64_t now_ns,
                           int peer_rank,
                           const std::string& deed) {
  warned_ns_ = now_ns;
  warn(concat("rank ",
              group.rank_idx(),
              " has waited ",
              (now_ns - start_ns_) / 1'000'000'000,
              " s for rank ",
              peer_rank,
              " to ",
              deed));
}

void ArrivalWatch::check(int64_t now_ns, const std::function<bool(int)>& is_missing) {
  circle_.check(now_ns, is_missing);
  if (clock_.has_run_out(group_, now_ns, peer_rank_, [this] {
        return entrance(site_) + group_.location(peer_rank_);
      }))
    give_up_absent(group_, site_, peer_rank_);
}

std::string describe_stall(const Group& group,
                           const WaitSite& site,
                           int culprit,
                           int64_t limit_ns,
                           const std::string& awaited) {
  return concat("rank ",
                culprit,
                " made no progress for ",
                seconds(limit_ns),
                " s in ",
                describe(site),
                "; rank ",
                group.rank_idx(),
                " waited for ",
                awaited);
}

void give_up_stalled(
    Group& group, const WaitSite& site, int culprit, int64_t limit_ns, const std::string& awaited) {
  group.abort(layout::AbortCause::kPeerTimeout,
              site,
              {culprit},
              describe_stall(group, site, culprit, limit_ns, awaited));
  group.throw_abort();
}

int find_culprit(Group& group, const WaitSite& site, int peer_rank) {
  int culprit = peer_rank;
  std::vector<uint8_t> has_asked(static_cast<size_t>(group.num_ranks()));
  has_asked[static_cast<size_t>(group.rank_idx())] = 1;
  while (true) {
    has_asked[static_cast<size_t>(culprit)] = 1;
    const std::optional<int> next = ask_awaited(group, site, culprit);
    if (!next || *next < 0 || *next >= group.num_ranks() || has_asked[static_cast<size_t>(*next)])
      return culprit;
    culprit = *next;
  }
}

}  // namespace moe::group
