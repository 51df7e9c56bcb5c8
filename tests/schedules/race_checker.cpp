#include "schedules/race_checker.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"

namespace moe::simt::checker {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kRace:
      return "race";
    case Kind::kScope:
      return "scope";
    case Kind::kProxy:
      return "proxy";
    case Kind::kBounds:
      return "bounds";
    case Kind::kUninitialised:
      return "uninitialized";
    case Kind::kBulk:
      return "bulk";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kDeadlock:
      return "deadlock";
    case Kind::kLivelock:
      return "livelock";
    case Kind::kResult:
      return "result";
    case Kind::kCrash:
      return "crash";
  }
  return "unknown";
}

namespace {

const char* access_name(bool is_write, bool is_atomic, bool is_bulk) {
  if (is_bulk)
    return is_write ? "bulk write" : "bulk read";
  if (is_atomic)
    return is_write ? "atomic write" : "atomic read";
  return is_write ? "write" : "read";
}

/// Thread that released a message.
Place place_of(const Message& message) {
  Place place;
  place.rank_idx = message.rank_idx;
  place.block = message.block;
  place.is_host = message.is_host;
  return place;
}

}  // namespace

bool reaches(Reach reach, const Place& place, int rank_idx, int64_t block, bool is_host) {
  switch (reach) {
    case Reach::kBlock:
      return !place.is_host && !is_host && place.rank_idx == rank_idx && place.block == block;
    case Reach::kDevice:
      return !place.is_host && !is_host && place.rank_idx == rank_idx;
    case Reach::kSystem:
      return true;
  }
  return false;
}

RaceChecker::RaceChecker(GuestMemory& memory, Findings& findings)
    : memory_(memory),
      findings_(findings),
      granules_(static_cast<size_t>(GuestMemory::kNumGranules)) {
  reset();
}

void RaceChecker::reset() {
  std::fill_n(granules_.begin(), memory_.num_used_granules(), Granule{});
  accesses_.assign(1, Access{});
  free_ = kNone;
  names_.clear();
}

Actor RaceChecker::make_actor(Place place) {
  Actor actor;
  actor.slot = static_cast<uint32_t>(names_.size());
  names_.emplace_back();
  if (names_.size() > Clock::kMaxSlots)
    throw std::length_error("more emulated threads than the checker has slots");
  rename(actor, std::move(place));
  return actor;
}

void RaceChecker::rename(Actor& actor, Place place) {
  names_[actor.slot].push_back({actor.step, place});
  actor.place = std::move(place);
}

std::string RaceChecker::describe(uint32_t slot, uint32_t step) const {
  const auto& names = names_[slot];
  size_t found = 0;
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i].from_step <= step)
      found = i;
  const Place& place = names[found].place;
  if (place.is_host)
    return concat(place.label, " of rank ", place.rank_idx);
  return concat(place.label,
                " (rank ",
                place.rank_idx,
                ", block ",
                place.block_idx,
                ", thread ",
                place.thread_idx,
                ")");
}

void RaceChecker::found(Kind kind, const Actor& actor, const std::string& text) {
  findings_.add(kind, concat(text, ", by ", name(actor)));
  throw Abandoned(text);
}

bool RaceChecker::check_bounds(Actor& actor, const void* address, int64_t bytes, Manner manner) {
  const Region* const region = memory_.find(address, bytes);
  const char* why = nullptr;
  if (region == nullptr)
    why = "is outside every region";
  else if (region->ownership == Ownership::kShared && region->block != actor.place.block)
    why = "is shared memory of another block";
  else if ((region->ownership == Ownership::kDevice || region->ownership == Ownership::kHost) &&
           actor.place.rank_idx >= 0 && region->rank_idx != actor.place.rank_idx)
    why = "is memory of another rank";
  else if (region->ownership == Ownership::kHeap && !actor.place.is_host && !manner.is_put &&
           memory_.is_of_other_node(region->rank_idx, actor.place.rank_idx))
    why = "is memory of another node, which only puts reach";
  if (why == nullptr)
    return true;
  found(Kind::kBounds,
        actor,
        concat(access_name(manner.is_write, manner.is_atomic, manner.is_bulk),
               " of ",
               bytes,
               " bytes at ",
               memory_.describe(address),
               ' ',
               why));
  return false;
}

bool RaceChecker::access(Actor& actor, const void* address, int64_t bytes, Manner manner) {
  if (!check_bounds(actor, address, bytes, manner))
    return false;
  Region& region = *memory_.find(address, 1);
  (manner.is_write ? region.bytes_stored : region.bytes_loaded) += bytes;
  if (!actor.place.is_host && memory_.is_of_other_device(region.rank_idx, actor.place.rank_idx))
    (manner.is_write ? region.bytes_stored_across : region.bytes_loaded_across) += bytes;
  const auto* place = static_cast<const std::byte*>(address);
  while (bytes > 0) {
    const int64_t granule_idx = memory_.granule(place);
    const int64_t first = place - memory_.address_of(granule_idx);
    const int64_t part = std::min(bytes, GuestMemory::kGranuleBytes - first);
    const auto mask = static_cast<uint16_t>(((1u << part) - 1u) << first);
    touch(actor, granule_idx, mask, manner, region);
    place += part;
    bytes -= part;
  }
  return true;
}

void RaceChecker::touch(
    Actor& actor, int64_t granule_idx, uint16_t mask, Manner manner, const Region& region) {
  Granule& granule = granules_[static_cast<size_t>(granule_idx)];
  uint16_t written = 0;
  for (uint32_t i = granule.writes; i != kNone; i = accesses_[i].next) {
    const Access& other = accesses_[i];
    written |= other.mask;
    if ((other.mask & mask) == 0)
      continue;
    if (!knows(actor, other)) {
      if (!(other.is_atomic && manner.is_atomic))
        report_race(actor, granule_idx, other.mask & mask, manner, other, true);
    } else if (manner.is_constant && actor.at_launch.at(other.slot) < other.step) {
      found(Kind::kRace,
            actor,
            concat("a constant load at ",
                   memory_.describe(memory_.address_of(granule_idx)),
                   " of what ",
                   describe(other.slot, other.step),
                   " wrote while the kernel ran"));
    } else if (manner.is_bulk) {
      check_proxy(actor, other, granule_idx, manner, region);
    }
  }
  if (!manner.is_write) {
    if (!region.is_defined && (mask & ~written) != 0)
      found(Kind::kUninitialised,
            actor,
            concat(access_name(false, manner.is_atomic, manner.is_bulk),
                   " of bytes that nobody has written at ",
                   memory_.describe(memory_.address_of(granule_idx) +
                                    std::countr_zero(static_cast<unsigned>(mask & ~written)))));
    note(actor, &granule.reads, mask, manner);
    return;
  }
  for (uint32_t i = granule.reads; i != kNone; i = accesses_[i].next) {
    const Access& other = accesses_[i];
    if ((other.mask & mask) != 0 && !knows(actor, other) && !(other.is_atomic && manner.is_atomic))
      report_race(actor, granule_idx, other.mask & mask, manner, other, false);
  }
  forget(actor, &granule.reads, mask);
  forget(actor, &granule.writes, mask);
  note(actor, &granule.writes, mask, manner);
}

void RaceChecker::check_proxy(const Actor& actor,
                              const Access& write,
                              int64_t granule_idx,
                              Manner manner,
                              const Region& region) {
  const bool is_shared = region.ownership == Ownership::kShared;
  // Bulk copies of one block reach memory by the same path.
  if (write.is_bulk && is_shared)
    return;
  const Clock& known = is_shared ? actor.knowledge.bulk_shared : actor.knowledge.bulk;
  if (known.at(write.slot) >= write.step)
    return;
  found(Kind::kProxy,
        actor,
        concat(access_name(manner.is_write, false, true),
               " at ",
               memory_.describe(memory_.address_of(granule_idx)),
               " without a proxy fence after the ",
               access_name(true, write.is_atomic, write.is_bulk),
               " by ",
               describe(write.slot, write.step)));
}

uint32_t RaceChecker::obtain() {
  if (free_ != kNone) {
    const uint32_t idx = free_;
    free_ = accesses_[idx].next;
    return idx;
  }
  accesses_.emplace_back();
  return static_cast<uint32_t>(accesses_.size() - 1);
}

void RaceChecker::note(Actor& actor, uint32_t* list, uint16_t mask, Manner manner) {
  for (uint32_t* link = list; *link != kNone;) {
    Access& access = accesses_[*link];
    const bool is_same = access.slot == actor.slot && access.is_atomic == manner.is_atomic &&
                         access.is_bulk == manner.is_bulk;
    if (is_same && access.step == actor.step) {
      access.mask |= mask;
      return;
    }
    // A thread that is ordered after this access is ordered after what this one knows. What differs
    // in manner stays: an ordinary access excludes more than an atomic one.
    const bool is_implied = (is_same || (!manner.is_write && !manner.is_atomic && !manner.is_bulk &&
                                         !access.is_bulk && knows(actor, access))) &&
                            (access.mask & ~mask) == 0;
    if (is_implied) {
      const uint32_t idx = *link;
      *link = access.next;
      access.next = free_;
      free_ = idx;
      continue;
    }
    link = &access.next;
  }
  const uint32_t idx = obtain();
  accesses_[idx] = {
      actor.step, static_cast<uint16_t>(actor.slot), mask, *list, manner.is_atomic, manner.is_bulk};
  *list = idx;
}

void RaceChecker::forget(const Actor& actor, uint32_t* list, uint16_t mask) {
  for (uint32_t* link = list; *link != kNone;) {
    Access& access = accesses_[*link];
    if ((access.mask & mask) != 0 && knows(actor, access)) {
      access.mask &= static_cast<uint16_t>(~mask);
      if (access.mask == 0) {
        const uint32_t idx = *link;
        *link = access.next;
        access.next = free_;
        free_ = idx;
        continue;
      }
    }
    link = &access.next;
  }
}

void RaceChecker::forget(const std::byte* address, int64_t bytes) {
  const auto drop = [&](uint32_t* list) {
    while (*list != kNone) {
      const uint32_t idx = *list;
      *list = accesses_[idx].next;
      accesses_[idx].next = free_;
      free_ = idx;
    }
  };
  const int64_t first = memory_.granule(address);
  const int64_t num_granules =
      (bytes + GuestMemory::kGranuleBytes - 1) / GuestMemory::kGranuleBytes;
  for (int64_t i = first; i < first + num_granules; ++i) {
    drop(&granules_[static_cast<size_t>(i)].writes);
    drop(&granules_[static_cast<size_t>(i)].reads);
  }
}

void RaceChecker::report_race(const Actor& actor,
                              int64_t granule_idx,
                              uint16_t mask,
                              Manner manner,
                              const Access& other,
                              bool is_other_write) {
  const auto* const address =
      memory_.address_of(granule_idx) + std::countr_zero(static_cast<unsigned>(mask));
  found(Kind::kRace,
        actor,
        concat("nothing orders the ",
               access_name(manner.is_write, manner.is_atomic, manner.is_bulk),
               " at ",
               memory_.describe(address),
               " after the ",
               access_name(is_other_write, other.is_atomic, other.is_bulk),
               " by ",
               describe(other.slot, other.step)));
}

Message RaceChecker::release(Actor& actor, Order order, Reach reach) {
  Message message;
  const bool is_release = order == Order::kRelease || order == Order::kAcquireRelease;
  if (is_release) {
    message.is_set = true;
    message.knowledge = close(actor);
    message.reach = reach;
  } else if (actor.fenced.is_set) {
    message = actor.fenced;
    message.reach = std::min(message.reach, reach);
  }
  message.rank_idx = actor.place.rank_idx;
  message.block = actor.place.block;
  message.is_host = actor.place.is_host;
  return message;
}

void RaceChecker::acquire(Actor& actor, const Message& message, Order order, Reach reach) {
  if (!message.is_set)
    return;
  const bool is_acquire = order == Order::kAcquire || order == Order::kAcquireRelease;
  Message seen = message;
  const Place writer = place_of(message);
  // Both sides' scopes must reach the other.
  if (!reaches(
          message.reach, writer, actor.place.rank_idx, actor.place.block, actor.place.is_host) ||
      !reaches(reach, actor.place, message.rank_idx, message.block, message.is_host))
    return;
  if (!is_acquire) {
    actor.unfenced.push_back(std::move(seen));
    return;
  }
  actor.knowledge.all.join(message.knowledge.all);
  // What another block's bulk copies may rely on says nothing about this block's.
  if (message.block == actor.place.block && message.rank_idx == actor.place.rank_idx) {
    actor.knowledge.bulk.join(message.knowledge.bulk);
    actor.knowledge.bulk_shared.join(message.knowledge.bulk_shared);
  }
}

void RaceChecker::fence(Actor& actor, Reach reach) {
  for (const Message& message : actor.unfenced)
    acquire(actor, message, Order::kAcquire, reach);
  actor.unfenced.clear();
  actor.fenced = release(actor, Order::kRelease, reach);
}

void RaceChecker::fence_proxy(Actor& actor, Space space) {
  const Knowledge known = close(actor);
  if (space == Space::kAll)
    actor.knowledge.bulk.join(known.all);
  actor.knowledge.bulk_shared.join(known.all);
}

Knowledge RaceChecker::close(Actor& actor) {
  actor.knowledge.all.raise(actor.slot, actor.step);
  ++actor.step;
  return actor.knowledge;
}

void RaceChecker::meet(Actor* const* actors, int num_actors) {
  Knowledge joined;
  for (int i = 0; i < num_actors; ++i) {
    const Knowledge& own = actors[i]->knowledge;
    // Most have met before and share what they know.
    if (i == 0 || !own.all.is_same(actors[i - 1]->knowledge.all))
      joined.all.join(own.all);
    if (i == 0 || !own.bulk.is_same(actors[i - 1]->knowledge.bulk))
      joined.bulk.join(own.bulk);
    if (i == 0 || !own.bulk_shared.is_same(actors[i - 1]->knowledge.bulk_shared))
      joined.bulk_shared.join(own.bulk_shared);
  }
  for (int i = 0; i < num_actors; ++i)
    joined.all.raise(actors[i]->slot, actors[i]->step++);
  for (int i = 0; i < num_actors; ++i)
    actors[i]->knowledge = joined;
}

Knowledge RaceChecker::behind_launch(const Knowledge& earlier, int rank_idx) const {
  Knowledge behind = earlier;
  // The boundary orders bulk copies after what this rank did, not after what it acquired.
  for (uint32_t slot = 0; slot < names_.size(); ++slot) {
    const int owner = names_[slot].front().place.rank_idx;
    if (owner >= 0 && owner != rank_idx)
      continue;
    behind.bulk.raise(slot, earlier.all.at(slot));
    behind.bulk_shared.raise(slot, earlier.all.at(slot));
  }
  return behind;
}

}  // namespace moe::simt::checker
