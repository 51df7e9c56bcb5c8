#include "ops/copy_run.h"

#include <algorithm>

#include "core/text.h"
#include "group/peer_wait.h"

namespace moe::ops {

namespace {

using layout::CopyRow;
using layout::CopyVerdict;
using layout::Phase;
using layout::RowStatus;

// Time that a failed run waits for peers to write here no more. They look up between parts of about
// a megabyte.
constexpr int64_t kStopNs = 100'000'000;

bool is_among(const std::vector<int>& ranks, int rank_idx) {
  return std::binary_search(ranks.begin(), ranks.end(), rank_idx);
}

}  // namespace

CopyRun::CopyRun(BatchedCopy& engine,
                 layout::Operation operation,
                 const group::InterruptCheck& interrupt_check)
    : BufferOperation(engine, operation, interrupt_check),
      engine_(engine),
      rows_(static_cast<size_t>(engine.num_ranks())),
      offered_here_(rows_.size()) {
  check_closed();
  begin();
}

CopyRun::~CopyRun() {
  if (is_writing_)
    prepared_->end_writes(true);
}

void CopyRun::check_closed() {
  const auto& workspace = engine_.own_workspace();
  BufferOperation::check_closed(
      [&](int peer_rank) { return sync::load_acquire(workspace.closed(peer_rank).value); });
}

CopyStats CopyRun::execute(const std::shared_ptr<PreparedCopies>& given, bool with_checksums) {
  const int64_t start_ns = sync::now_ns();
  prepared_ = given;
  with_checksums_ = with_checksums;
  PreparedCopies& prepared = *given;
  prepared.begin_checksums();
  if (!prepared.problem().empty())
    reject({}, RowStatus::kInvalidArgument, prepared.problem());
  try {
    while (!prepared.has_table(group_.memory()) || !prepared.begin_writes()) {
      prepared.take_table();
      prepared.make_table(group_.memory(), engine_.take_table_number());
    }
    is_writing_ = true;
  } catch (const CapacityError& error) {
    reject({}, error);
  }
  publish_row({});
  collect_rows();
  raise_agreed();
  const RankProblem problem = match(prepared);
  may_be_written_to_ = true;
  publish_verdict(problem);
  collect_verdicts();
  PreparedCopies::Route& route = prepared.route();
  route_incoming(prepared);
  const int64_t copy_start_ns = sync::now_ns();
  step_ = Phase::kData;
  move(route);
  release_done();
  await_done(route);
  prepared.end_writes(false);
  is_writing_ = false;
  complete();
  if (with_checksums)
    prepared.end_checksums();
  const int64_t end_ns = sync::now_ns();
  CopyStats stats;
  stats.direct_bytes = route.direct_bytes;
  stats.slot_bytes = route.slot_bytes;
  stats.local_bytes = route.local_bytes;
  stats.copy_ns = end_ns - copy_start_ns;
  stats.total_ns = end_ns - start_ns;
  return stats;
}

void CopyRun::publish_row(const RowMessage& message) {
  CopyRow row{};
  row.status = static_cast<int32_t>(message.status);
  store_text(row.message, message.message);
  row.needed_bytes = message.needed_bytes;
  row.available_bytes = message.available_bytes;
  const PreparedCopies* const prepared =
      message.status == RowStatus::kOk ? prepared_.get() : nullptr;
  if (prepared != nullptr) {
    row.prepared_number = prepared->number();
    row.table = prepared->table_window()->offer();
  }
  const auto fill_for = [&](int peer_rank) {
    if (prepared == nullptr)
      return;
    row.first_entry = static_cast<int64_t>(prepared->first_receive(peer_rank));
    row.num_entries =
        static_cast<int64_t>(prepared->first_receive(peer_rank + 1)) - row.first_entry;
  };
  fill_for(group_.rank_idx());
  rows_[static_cast<size_t>(group_.rank_idx())] = row;
  for_active_peers([&](int peer_rank) {
    fill_for(peer_rank);
    CopyRow& target = engine_.workspace(peer_rank).row(group_.rank_idx());
    sync::write_body(target, row);
    sync::store_release(target.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  });
}

void CopyRun::collect_rows() {
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (peer_rank == group_.rank_idx() || !group_.is_active(peer_rank))
      continue;
    await_row(peer_rank);
    const CopyRow& source = engine_.own_workspace().row(peer_rank);
    CopyRow& row = rows_[static_cast<size_t>(peer_rank)];
    sync::read_body(row, source);
  }
}

/// Throws what rows say is wrong, if anything is: the same on every rank.
void CopyRun::raise_agreed() {
  std::vector<RankProblem> problems;
  for (const CopyRow& row : rows_)
    problems.push_back(
        {static_cast<RowStatus>(row.status), row.message, row.needed_bytes, row.available_bytes});
  const std::exception_ptr error = join_problems(problems);
  if (error == nullptr)
    return;
  // Verdicts tell that every rank has read the rows, so that the next run may store others.
  publish_verdict({});
  collect_verdicts();
  settle();
  std::rethrow_exception(error);
}

void CopyRun::exchange_rejection(const RowMessage& row) {
  publish_row(row);
  collect_rows();
  raise_agreed();
}

void CopyRun::publish_verdict(const RankProblem& problem) {
  CopyVerdict verdict{};
  verdict.status = static_cast<int32_t>(problem.status);
  verdict.needed_bytes = problem.needed_bytes;
  verdict.available_bytes = problem.available_bytes;
  store_text(verdict.message, problem.text);
  const auto store_in = [&](CopyVerdict& target) {
    sync::write_body(target, verdict);
    sync::store_release(target.epoch, epoch_);
  };
  store_in(engine_.own_workspace().verdict(group_.rank_idx()));
  for_active_peers([&](int peer_rank) {
    verdict.num_offers = 0;
    for (size_t i = 0; i < own_slots_.size(); ++i)
      if (const auto& slots = prepared_->route().outgoing[i]; is_among(slots.peers, peer_rank))
        verdict.offers[verdict.num_offers++] = {own_slots_[i]->offer(), slots.num_entries};
    store_in(engine_.workspace(peer_rank).verdict(group_.rank_idx()));
    sync::ring(group_.doorbell(peer_rank));
  });
}

/// Waits for what every rank found, and throws it, the same on every rank.
void CopyRun::collect_verdicts() {
  step_ = Phase::kVerdicts;
  const auto& workspace = engine_.own_workspace();
  const auto is_awaited = [&](int peer_rank) {
    return sync::load_acquire(workspace.verdict(peer_rank).epoch) < epoch_;
  };
  std::vector<RankProblem> problems(static_cast<size_t>(group_.num_ranks()));
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    await_entered(Phase::kVerdicts, [&] { return !is_awaited(peer_rank); }, is_awaited);
    CopyVerdict verdict;
    sync::read_body(verdict, workspace.verdict(peer_rank));
    problems[static_cast<size_t>(peer_rank)] = {static_cast<RowStatus>(verdict.status),
                                                verdict.message,
                                                verdict.needed_bytes,
                                                verdict.available_bytes};
    offered_here_[static_cast<size_t>(peer_rank)].assign(verdict.offers,
                                                         verdict.offers + verdict.num_offers);
  }
  if (const std::exception_ptr error = join_problems(problems)) {
    settle();
    std::rethrow_exception(error);
  }
}

void CopyRun::settle() {
  release_done();
  consume();
}

void CopyRun::release_done() {
  // Bytes read from a peer count only if that peer had not given up by then.
  sync::fence_acquire();
  group_.check_abort();
  for_active_peers([&](int peer_rank) {
    sync::store_release(engine_.workspace(peer_rank).done(group_.rank_idx()).value, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  });
}

void CopyRun::fail(const std::string& reason) {
  if (!is_open())
    return;
  give_up(reason);
  for_active_peers([&](int peer_rank) {
    sync::store_release(engine_.workspace(peer_rank).stopped(group_.rank_idx()).value, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  });
  engine_.quarantine_slots();
  if (!prepared_)
    return;
  group_.retired().quarantine(prepared_->take_table());
  for (const auto& pages : prepared_->shared_pages())
    group_.retired().quarantine(pages->window());
  if (!may_be_written_to_)
    return;
  const auto& workspace = engine_.own_workspace();
  const auto all_stopped = [&] {
    bool is_quiet = true;
    for_active_peers([&](int peer_rank) {
      is_quiet = is_quiet && (sync::load_acquire(workspace.stopped(peer_rank).value) >= epoch_ ||
                              sync::load_acquire(workspace.done(peer_rank).value) >= epoch_ ||
                              group_.state(peer_rank) != PeerState::kAlive);
    });
    return is_quiet;
  };
  const int64_t limit_ns = sync::now_ns() + kStopNs;
  while (!all_stopped()) {
    if (sync::now_ns() > limit_ns) {
      group_.retired().keep(prepared_->owner());
      return;
    }
    sync::sleep_unless(group_.own_doorbell(), kStopNs / 10, all_stopped);
  }
}

// ---- What a batched copy waits for: rows, which may come late, and ranks that have entered.

bool CopyRun::is_missing(int peer_rank) const {
  return sync::load_acquire(engine_.own_workspace().done(peer_rank).value) < epoch_;
}

void CopyRun::progress() {
  // Only this rank's own thread raises it.
  auto& activity = engine_.own_workspace().activity();
  sync::store_relaxed(activity.progress, sync::load_relaxed(activity.progress) + 1);
}

void CopyRun::await_row(int peer_rank) {
  const auto has_row = [&](int rank_idx) {
    return sync::load_acquire(engine_.own_workspace().row(rank_idx).epoch) >= epoch_;
  };
  const auto ready = [&] { return has_row(peer_rank); };
  if (ready()) [[likely]]
    return;
  const group::WaitSite where = site(Phase::kRows);
  group::ArrivalWatch arrival(group_, where, peer_rank);
  group::await_peer(group_, where, ready, [&](int64_t now_ns) {
    progress();
    check_closed();
    // Nobody is done before it has this rank's verdict, which follows all rows.
    group::check_gone(group_, where, [&](int gone_rank) { return is_missing(gone_rank); });
    arrival.check(now_ns, [&](int rank_idx) { return !has_row(rank_idx); });
  });
}

void CopyRun::await_entered(Phase phase,
                            const std::function<bool()>& ready,
                            const std::function<bool(int)>& is_awaited) {
  if (ready()) [[likely]]
    return;
  // A rank that has entered raises its progress while it moves bytes and while it waits for others:
  // whose stands still is the one to blame, whomever this rank waits for. So nobody is asked.
  struct Sign {
    uint64_t progress;
    int64_t since_ns;
  };
  const int64_t start_ns = sync::now_ns();
  std::vector<Sign> signs(rows_.size());
  for_active_peers([&](int peer_rank) {
    signs[static_cast<size_t>(peer_rank)] = {
        sync::load_relaxed(engine_.workspace(peer_rank).activity().progress), start_ns};
  });
  const group::WaitSite where = site(phase);
  const auto give_up = [&](int peer_rank, int64_t limit_ns) {
    group::give_up_stalled(group_, where, peer_rank, limit_ns, concat("rank ", peer_rank));
  };
  group::await_peer(group_, where, ready, [&](int64_t now_ns) {
    progress();
    group::check_gone(group_, where, [&](int gone_rank) { return is_missing(gone_rank); });
    for_active_peers([&](int peer_rank) {
      Sign& sign = signs[static_cast<size_t>(peer_rank)];
      const uint64_t now = sync::load_relaxed(engine_.workspace(peer_rank).activity().progress);
      if (now != sign.progress)
        sign = {now, now_ns};
      else if (now_ns - sign.since_ns > group_.stall_timeout_ns() && is_missing(peer_rank))
        give_up(peer_rank, group_.stall_timeout_ns());
      // Ranks that only wait for each other would show progress for ever.
      if (now_ns - start_ns > group_.arrival_timeout_ns() && is_awaited(peer_rank))
        give_up(peer_rank, group_.arrival_timeout_ns());
    });
  });
}

}  // namespace moe::ops
