#include <algorithm>
#include <cstring>
#include <map>

#include "ops/copy_run.h"

// Match of copies: a sender compares its sends with its peers' tables, and tells receivers in which
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

  /// Compares both ends in all but their places.
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

/// Works out what this rank sends. @return the problem, if there is one.
RankProblem CopyRun::match(PreparedCopies& prepared) {
  PreparedCopies::Route& route = prepared.route();
  std::vector<uint64_t> numbers;
  for (const CopyRow& row : rows_)
    numbers.push_back(row.prepared_number);
  if (route.numbers != numbers) {
    route = PreparedCopies::Route{};
    std::vector<uint32_t> entry_of;
    if (const std::string problem = compare_ends(prepared, &entry_of); !problem.empty())
      return {layout::RowStatus::kInvalidArgument, problem};
    route_outgoing(prepared, entry_of);
  }
  try {
    offer_slots(route);
  } catch (const CapacityError& error) {
    return {
        layout::RowStatus::kNoCapacity, error.what(), error.needed_bytes, error.available_bytes};
  }
  store_order(route);
  return {};
}

/// @param entry_of  Becomes the index of the entry that each send goes to, in its receiver's share.
/// @return text of what is wrong between the sends of this rank and the receives of its peers.
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
  std::vector<uint32_t> through_slots;
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
      through_slots.push_back(send_idx);
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
  route_slots(prepared, entry_of, through_slots);
}

/// Fills in what goes through slots: bytes that several peers receive once, to all of them.
/// @param sends  Sends through slots, in the order of PreparedCopies::by_address().
void CopyRun::route_slots(PreparedCopies& prepared,
                          const std::vector<uint32_t>& entry_of,
                          const std::vector<uint32_t>& sends) {
  const std::vector<CopyItem>& items = prepared.sends();
  // Sends by who receives their bytes; those of the same bytes adjacent.
  std::map<std::vector<int>, std::vector<uint32_t>> by_readers;
  for (auto first = sends.begin(); first != sends.end();) {
    std::vector<int> readers;
    auto end = first;
    do
      readers.push_back(items[*end++].peer_rank);
    while (end != sends.end() && items[*end].data == items[*first].data &&
           items[*end].shape == items[*first].shape && items[*end].peer_rank > readers.back());
    auto& sent = by_readers[readers];
    sent.insert(sent.end(), first, end);
    first = end;
  }
  // If a peer would be offered more slots than a verdict has room for, those that carry the
  // fewest are each peer's own.
  std::vector<decltype(by_readers)::const_iterator> shared;
  for (auto each = by_readers.cbegin(); each != by_readers.cend(); ++each)
    if (each->first.size() > 1)
      shared.push_back(each);
  std::stable_sort(shared.begin(), shared.end(), [](const auto& left, const auto& right) {
    return left->second.size() > right->second.size();
  });
  std::vector<int> num_offers(rows_.size(), 1);  // its own
  for (const auto each : shared) {
    const bool has_room = std::all_of(each->first.begin(), each->first.end(), [&](int reader) {
      return num_offers[static_cast<size_t>(reader)] < layout::CopyVerdict::kMaxOffers;
    });
    if (has_room) {
      for (const int reader : each->first)
        ++num_offers[static_cast<size_t>(reader)];
      continue;
    }
    for (const uint32_t send_idx : each->second)
      by_readers[{items[send_idx].peer_rank}].push_back(send_idx);
    by_readers.erase(each);
  }
  PreparedCopies::Route& route = prepared.route();
  route.order.resize(rows_.size());
  for (const auto& [readers, sent] : by_readers) {
    PreparedCopies::SlotStream& slots = route.outgoing.emplace_back();
    slots.peers = readers;
    slots.num_entries = static_cast<int64_t>(sent.size() / readers.size());
    for (size_t i = 0; i < sent.size(); ++i) {
      const CopyItem& send = items[sent[i]];
      const uint32_t first = sent[i - i % readers.size()];
      route.order[static_cast<size_t>(send.peer_rank)].push_back(entry_of[sent[i]]);
      if (sent[i] == first)
        slots.stream.add(send.place(), cpu::Place{}, send.shape.bytes, prepared.blocks_of(first));
      else
        prepared.hash_as(sent[i], first);
    }
  }
}

/// Makes slots where there are none, for peers to hear of with the verdict.
void CopyRun::offer_slots(const PreparedCopies::Route& route) {
  for (const PreparedCopies::SlotStream& slots : route.outgoing)
    own_slots_.push_back(&engine_.slots(slots.peers, slots.stream.end()));
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
  route.writes_here.assign(rows_.size(), 0);
  const ReceiveTable table = prepared.table();
  for_active_peers([&](int peer_rank) {
    const size_t first = prepared.first_receive(peer_rank);
    const auto end = table.entries() + prepared.first_receive(peer_rank + 1);
    route.writes_here[static_cast<size_t>(peer_rank)] =
        std::any_of(table.entries() + first, end, [](const ReceiveEntry& entry) {
          return entry.bytes > 0 && entry.is_in_heap != 0;
        });
    const uint32_t* order = table.order() + first;
    for (const layout::OfferedSlots& offered : offered_here_[static_cast<size_t>(peer_rank)]) {
      PreparedCopies::SlotStream& slots = route.incoming.emplace_back();
      slots.peers = {peer_rank};
      slots.num_entries = offered.num_entries;
      for (int64_t i = 0; i < offered.num_entries; ++i) {
        uint32_t place = 0;
        sync::read_shared(&place, order++, sizeof(place));
        const CopyItem& receive = prepared.receives()[first + place];
        slots.stream.add(cpu::Place{}, receive.place(), receive.shape.bytes, nullptr);
      }
    }
  });
  for (const CopyRow& row : rows_)
    route.numbers.push_back(row.prepared_number);
}

}  // namespace moe::ops
