#include "group/deadlock_watch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "group/message.h"
#include "group/wait_policy.h"

namespace moe::group {

namespace {

// Most waits are over before anybody has to hear of them.
constexpr int64_t kShowNs = 50'000'000;
constexpr int64_t kAskEveryNs = 250'000'000;
// A longer circle has more ranks than its text has room for; its waits end by their time limit.
constexpr int32_t kMostHops = 256;
constexpr size_t kMostTextBytes = 4096;

/// A probe without its text.
struct ProbeHead {
  EntryWait::Id origin;
  uint64_t buffer_number = 0;
  uint64_t epoch = 0;
  int32_t num_hops = 0;
  bool is_verdict = false;  ///< the circle was found; the ranks in it are told
};

/// "May I wait for you to enter this?": what travels from rank to rank.
struct Probe : ProbeHead {
  std::string text;  ///< text of all waits so far

  std::string encode() const {
    std::string bytes;
    append_value<ProbeHead>(&bytes, *this);
    return bytes + text;
  }

  static Probe decode(const std::string& bytes) {
    size_t position = 0;
    const auto head = read_value<ProbeHead>(bytes, &position);
    return {head, bytes.substr(position)};
  }
};

/// Sends @p probe to the rank that @p wait waits for.
void send(const EntryWait& wait, Probe probe) {
  probe.buffer_number = wait.buffer_number;
  probe.epoch = wait.epoch;
  wait.link->post(wait.peer_link_rank, wait.id.channel, 0, probe.encode());
}

void answer_probe(const EntryTable& entries, const std::string& message) {
  Probe probe = Probe::decode(message);
  if (entries.has_entered(probe.buffer_number, probe.epoch))
    return;
  auto wait = entries.wait_in(probe.buffer_number);
  if (wait == nullptr && !entries.has_queued(probe.buffer_number))
    wait = entries.wait_of_caller();
  if (wait == nullptr || wait->has_ended())
    return;
  const bool is_back = wait->id == probe.origin;
  const bool is_last = is_back && probe.is_verdict;
  if (is_back)
    probe.is_verdict = true;
  else if (!probe.is_verdict && probe.text.size() < kMostTextBytes)
    probe.text += "; " + wait->text;
  if (probe.is_verdict)
    wait->conclude(probe.text);
  if (!is_last && ++probe.num_hops < kMostHops)
    send(*wait, std::move(probe));
}

}  // namespace

ShownWait::ShownWait(
    Peers& peers, uint64_t buffer_number, uint64_t epoch, int peer_rank, const std::string& what)
    : peers_(peers), peer_rank_(peer_rank), wait_(std::make_shared<EntryWait>()) {
  wait_->id = {
      peers.channel(Topic::kProbe), peers.rank_idx(), peers.mail().entries()->next_number()};
  wait_->link = peers.link();
  wait_->peer_link_rank = peers.link_rank(peer_rank);
  wait_->buffer_number = buffer_number;
  wait_->epoch = epoch;
  wait_->text = concat("rank ", peers.rank_idx(), " waits for rank ", peer_rank, " ", what);
  if (kRanksHaveThreads)
    peers.mail().entries()->begin(wait_);
}

ShownWait::~ShownWait() {
  if (kRanksHaveThreads)
    peers_.mail().entries()->end(wait_);
}

DeadlockWatch::DeadlockWatch(Peers& peers, const WaitSite& site, int peer_rank, int64_t start_ns)
    : peers_(peers), site_(site), peer_rank_(peer_rank), start_ns_(start_ns), asked_ns_(start_ns) {}

void DeadlockWatch::check(int64_t now_ns, const std::function<bool(int)>& is_missing) {
  if (!kRanksHaveThreads || now_ns - start_ns_ < kShowNs)
    return;
  if (!shown_)
    shown_.emplace(peers_,
                   site_.buffer_number,
                   static_cast<uint64_t>(site_.epoch),
                   peer_rank_,
                   concat("to ", site_.entrance()));
  const EntryWait& wait = shown_->wait();
  if (const auto circle = wait.verdict())
    give_up(*circle, is_missing);
  if (now_ns - asked_ns_ < kAskEveryNs)
    return;
  asked_ns_ = now_ns;
  Probe probe;
  probe.origin = wait.id;
  probe.text = wait.text;
  send(wait, std::move(probe));
}

void DeadlockWatch::give_up(const std::string& circle, const std::function<bool(int)>& is_missing) {
  // Blames the ranks that have left the order that most ranks keep; of two equal halves, the one
  // without the lowest rank.
  std::vector<int> missing;
  std::vector<int> present;
  for (int rank_idx = 0; rank_idx < peers_.num_ranks(); ++rank_idx)
    if (peers_.is_active(rank_idx))
      (rank_idx != peers_.rank_idx() && is_missing(rank_idx) ? missing : present)
          .push_back(rank_idx);
  const bool is_few = missing.size() < present.size() ||
                      (missing.size() == present.size() && present.front() < missing.front());
  peers_.abort(layout::AbortCause::kPeerTimeout,
               site_,
               is_few ? missing : present,
               concat("ranks wait for each other in different calls: ", circle));
  peers_.throw_abort();
}

void answer_probes(Peers& peers) {
  std::string message;
  for (int peer_rank = 0; peer_rank < peers.num_ranks(); ++peer_rank)
    while (peer_rank != peers.rank_idx() && peers.take(peer_rank, Topic::kProbe, 0, &message))
      answer_probe(*peers.mail().entries(), message);
}

}  // namespace moe::group
