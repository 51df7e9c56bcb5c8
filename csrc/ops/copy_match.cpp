#include <algorithm>
#include <cstring>

#include "ops/copy_run.h"

// Who moves what: a sender compares its sends with its peers' tables, and tells receivers in which
// order bytes come through the slots.

namespace moe::ops {

namespace {

using layout::CopyRow;
using layout::ReceiveEntry;
using layout::ReceiveTable;
using layout::StridedBytes;

std::string name_of(const char (&dtype)[ReceiveEntry::kNameBytes]) {
  return std::string(dtype, strnlen(dtype, sizeof(dtype)));
}

/// Comparison of the sends of one rank to another with the receives there.
class Comparison {
 public:
  Comparison(int sender, int receiver) : sender_(sender), receiver_(receiver) {}

  void no_receive(const CopyItem& send) {
    add(send.task_id,
        concat("rank ",
               sender_,
               " sends ",
               send.shape.bytes,
               " bytes of ",
               name_of(send.dtype),
               " to rank ",
               receiver_,
               ", which does not receive it"));
  }

  void no_send(const ReceiveEntry& entry) {
    add(entry.task_id,
        concat("rank ",
               receiver_,
               " receives ",
               entry.bytes,
               " bytes of ",
               name_of(entry.dtype),
               " from rank ",
               sender_,
               ", which does not send it"));
  }

  /// Whether both ends are the same but for their places.
  void compare(const CopyItem& send, const ReceiveEntry& entry) {
    if (std::memcmp(send.dtype, entry.dtype, sizeof(entry.dtype)) != 0)
      add(send.task_id,
          concat("rank ",
                 sender_,
                 " sends ",
                 name_of(send.dtype),
                 ", rank ",
                 receiver_,
                 " receives ",
                 name_of(entry.dtype)));
    else if (send.shape.bytes != entry.bytes)
      add(send.task_id,
          concat("rank ",
                 sender_,
                 " sends ",
                 send.shape.bytes,
                 " bytes, rank ",
                 receiver_,
                 " receives ",
                 entry.bytes));
  }

  const std::string& first() const { return first_; }
  int64_t num_found() const { return num_found_; }

 private:
  void add(int64_t task_id, const std::string& what) {
    if (num_found_++ == 0)
      first_ = concat("task ", task_id, ": ", what);
  }

  int sender_;
  int receiver_;
  std::string first_;
  int64_t num_found_ = 0;
};

StridedBytes shape_of(const ReceiveEntry& entry, const ReceiveTable& table) {
  StridedBytes shape;
  shape.bytes = entry.bytes;
  shape.run_bytes = entry.run_bytes;
  shape.num_dims = entry.num_dims;
  for (int dim = 0; dim < entry.num_dims; ++dim) {
    const layout::TableDim& found = table.dims()[entry.first_dim + dim];
    shape.sizes[dim] = found.size;
    shape.strides[dim] = found.stride;
  }
  return shape;
}

}  // namespace

/// Works out what this rank sends. @return what is wrong, "" if nothing is.
std::string CopyRun::match(PreparedCopies& prepared) {
  PreparedCopies::Route& route = prepared.route();
  std::vector<uint64_t> numbers;
  for (const CopyRow& row : rows_)
    numbers.push_back(row.prepared_number);
  if (route.numbers != numbers) {
    route = PreparedCopies::Route{};
    std::vector<uint32_t> entry_of;
    if (std::string problem = compare_ends(prepared, &entry_of); !problem.empty())
      return problem;
    route_outgoing(prepared, entry_of);
  }
  store_order(route);
  return "";
}

/// @param entry_of  Becomes the index of the entry that each send goes to, in its receiver's share.
/// @return what is wrong between the sends of this rank and the receives of its peers.
std::string CopyRun::compare_ends(const PreparedCopies& prepared, std::vector<uint32_t>* entry_of) {
  std::string problem;
  int64_t num_problems = 0;
  const auto add_problem = [&](const std::string& what, int64_t count) {
    if (problem.empty())
      problem = what;
    num_problems += count;
  };
  entry_of->resize(prepared.sends().size());
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    const size_t end = prepared.first_send(peer_rank + 1);
    size_t send_idx = prepared.first_send(peer_rank);
    if (!group_.is_active(peer_rank)) {
      if (send_idx < end ||
          prepared.first_receive(peer_rank) < prepared.first_receive(peer_rank + 1))
        add_problem(concat("rank ",
                           group_.rank_idx(),
                           " has copies with rank ",
                           peer_rank,
                           ", which has failed"),
                    1);
      continue;
    }
    const CopyRow& row = rows_[static_cast<size_t>(peer_rank)];
    const ReceiveEntry* entries = table_of(peer_rank).entries() + row.first_entry;
    sync::note_read(entries, sizeof(ReceiveEntry) * static_cast<size_t>(row.num_entries));
    Comparison comparison(group_.rank_idx(), peer_rank);
    int64_t entry_idx = 0;
    while (send_idx < end || entry_idx < row.num_entries) {
      const CopyItem* send = send_idx < end ? &prepared.sends()[send_idx] : nullptr;
      const ReceiveEntry* entry = entry_idx < row.num_entries ? entries + entry_idx : nullptr;
      if (entry == nullptr || (send != nullptr && send->task_id < entry->task_id)) {
        comparison.no_receive(*send);
        ++send_idx;
      } else if (send == nullptr || entry->task_id < send->task_id) {
        comparison.no_send(*entry);
        ++entry_idx;
      } else {
        comparison.compare(*send, *entry);
        (*entry_of)[send_idx] = static_cast<uint32_t>(entry_idx);
        ++send_idx;
        ++entry_idx;
      }
    }
    if (comparison.num_found() > 0)
      add_problem(comparison.first(), comparison.num_found());
  }
  if (num_problems > 1)
    problem += concat(" (and ", num_problems - 1, " more)");
  return problem;
}

/// Fills in what this rank writes, to places in heaps or through slots.
void CopyRun::route_outgoing(PreparedCopies& prepared, const std::vector<uint32_t>& entry_of) {
  const auto num_ranks = static_cast<size_t>(group_.num_ranks());
  PreparedCopies::Route& route = prepared.route();
  route.order.resize(num_ranks);
  route.outgoing.resize(num_ranks);
  std::vector<ReceiveTable> tables(num_ranks);
  for_active_peers(
      [&](int peer_rank) { tables[static_cast<size_t>(peer_rank)] = table_of(peer_rank); });
  for (const uint32_t send_idx : prepared.by_address()) {
    const CopyItem& send = prepared.sends()[send_idx];
    const auto peer = static_cast<size_t>(send.peer_rank);
    const uint32_t entry_idx = entry_of[send_idx];
    uint64_t* const checksum = prepared.blocks_of(send_idx);
    if (send.peer_rank == group_.rank_idx()) {
      const size_t receive_idx = prepared.first_receive(send.peer_rank) + entry_idx;
      route.direct.add(send.place(), prepared.destination(receive_idx), send.shape.bytes, checksum);
      route.local_bytes += send.shape.bytes;
      continue;
    }
    const ReceiveEntry& entry = tables[peer].entries()[rows_[peer].first_entry + entry_idx];
    if (entry.is_in_heap == 0) {
      route.order[peer].push_back(entry_idx);
      route.outgoing[peer].add(send.place(), cpu::Place{}, send.shape.bytes, checksum);
      route.slot_bytes += send.shape.bytes;
      continue;
    }
    cpu::Place target{group_.resolve(send.peer_rank, entry.place, site(layout::Phase::kVerdicts)),
                      nullptr};
    if (entry.num_dims > 0)
      target.shape = &route.peer_shapes.emplace_back(shape_of(entry, tables[peer]));
    route.direct.add(send.place(), target, send.shape.bytes, checksum);
    route.direct_bytes += send.shape.bytes;
  }
}

/// Table of the receives of @p peer_rank, as it lies in its heap.
ReceiveTable CopyRun::table_of(int peer_rank) {
  const CopyRow& row = rows_[static_cast<size_t>(peer_rank)];
  return ReceiveTable(group_.resolve(peer_rank, row.table, site(layout::Phase::kVerdicts)));
}

/// Every run does: other sends may have stored another order meanwhile.
void CopyRun::store_order(const PreparedCopies::Route& route) {
  for_active_peers([&](int peer_rank) {
    const auto& order = route.order[static_cast<size_t>(peer_rank)];
    if (order.empty())
      return;
    const int64_t first_entry = rows_[static_cast<size_t>(peer_rank)].first_entry;
    sync::write_shared(
        table_of(peer_rank).order() + first_entry, order.data(), sizeof(order[0]) * order.size());
  });
}

/// Fills in what comes through the slots of this rank, in the order that senders have stored.
void CopyRun::route_incoming(PreparedCopies& prepared) {
  PreparedCopies::Route& route = prepared.route();
  if (!route.numbers.empty())
    return;
  const auto num_ranks = static_cast<size_t>(group_.num_ranks());
  route.incoming.resize(num_ranks);
  route.writes_here.assign(num_ranks, 0);
  const ReceiveTable table = prepared.table();
  for_active_peers([&](int peer_rank) {
    const size_t first = prepared.first_receive(peer_rank);
    const size_t end = prepared.first_receive(peer_rank + 1);
    size_t num_ordered = 0;
    for (size_t idx = first; idx < end; ++idx) {
      const ReceiveEntry& entry = table.entries()[idx];
      if (entry.bytes == 0)
        continue;
      if (entry.is_in_heap != 0) {
        route.writes_here[static_cast<size_t>(peer_rank)] = 1;
        continue;
      }
      uint32_t place = 0;
      sync::read_shared(&place, table.order() + first + num_ordered++, sizeof(place));
      const CopyItem& receive = prepared.receives()[first + place];
      route.incoming[static_cast<size_t>(peer_rank)].add(
          cpu::Place{}, receive.place(), receive.shape.bytes, nullptr);
    }
  });
  for (const CopyRow& row : rows_)
    route.numbers.push_back(row.prepared_number);
}

}  // namespace moe::ops
