// Bulk copies and the barriers they complete on.

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "schedules/machine.h"

namespace moe::simt::checker {

namespace {

constexpr uint32_t kCopyUnit = 16;

Manner bulk(bool is_write) {
  Manner manner;
  manner.is_write = is_write;
  manner.is_bulk = true;
  return manner;
}

Manner barrier_use(bool is_write) {
  Manner manner;
  manner.is_write = is_write;
  manner.is_atomic = true;
  return manner;
}

}  // namespace

Actor Machine::copy_actor(uint32_t slot, uint32_t step) {
  Actor copy;
  copy.slot = slot;
  copy.step = step;
  copy.knowledge = races_.close(running_->actor);
  copy.place = running_->actor.place;
  copy.is_copy = true;
  return copy;
}

void Machine::check_bulk(const void* shared, const void* global, uint32_t bytes) {
  const auto is_aligned = [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % kCopyUnit == 0;
  };
  if (!is_aligned(shared) || !is_aligned(global) || bytes % kCopyUnit != 0)
    races_.found(Kind::kBulk,
                 running_->actor,
                 concat("a bulk copy of ",
                        bytes,
                        " bytes between ",
                        guest_.describe(shared),
                        " and ",
                        guest_.describe(global),
                        " is not in units of 16 bytes"));
  const Region* const region = guest_.find(shared, 1);
  if (region != nullptr && region->ownership != Ownership::kShared)
    races_.found(Kind::kBulk,
                 running_->actor,
                 concat("a bulk copy takes ", guest_.describe(shared), " for shared memory"));
}

Machine::Barrier& Machine::barrier_at(const uint64_t* barrier) {
  const auto found = barriers_.find(barrier);
  if (found == barriers_.end())
    races_.found(Kind::kBulk,
                 running_->actor,
                 concat("no barrier has been initialized at ", guest_.describe(barrier)));
  return found->second;
}

void Machine::init_mbarrier(uint64_t* barrier, int num_arrivals) {
  Manner manner;
  manner.is_write = true;
  races_.access(running_->actor, barrier, sizeof(uint64_t), manner);
  const bool is_new = !barriers_.contains(barrier);
  Barrier& state = barriers_[barrier];
  if (!is_new && state.num_in_flight > 0)
    races_.found(Kind::kBulk,
                 running_->actor,
                 concat("the barrier at ",
                        guest_.describe(barrier),
                        " is initialized while copies complete on it"));
  if (is_new) {
    Place place = running_->actor.place;
    place.label = "bulk loads of " + place.label;
    state.slot = races_.make_actor(std::move(place)).slot;
  }
  state.num_arrivals = num_arrivals;
  state.num_missing = num_arrivals;
  state.bytes_missing = 0;
  state.phase = is_new ? 0 : (state.phase + 2) & ~1u;  // steps of its slot go on
  state.is_fenced = false;
  running_->unfenced_barriers.push_back(barrier);
}

void Machine::fence_mbarrier_init() {
  for (uint64_t* const barrier : running_->unfenced_barriers)
    barrier_at(barrier).is_fenced = true;
  running_->unfenced_barriers.clear();
}

void Machine::complete_phases(Barrier& barrier) {
  if (barrier.num_missing > 0 || barrier.bytes_missing != 0)
    return;
  ++num_changes_;
  ++barrier.phase;
  barrier.num_missing = barrier.num_arrivals;
  barrier.completed.join(barrier.arrived);
  barrier.completed.all.raise(barrier.slot, barrier.phase);
}

void Machine::arrive_expect(uint64_t* barrier, uint32_t bytes) {
  races_.access(running_->actor, barrier, sizeof(uint64_t), barrier_use(true));
  Barrier& state = barrier_at(barrier);
  drain(running_);
  state.arrived.join(races_.close(running_->actor));
  state.bytes_missing += bytes;
  if (--state.num_missing < 0)
    races_.found(Kind::kBulk,
                 running_->actor,
                 concat("more than ",
                        state.num_arrivals,
                        " arrivals in one phase of the barrier at ",
                        guest_.describe(barrier)));
  complete_phases(state);
}

bool Machine::try_wait(uint64_t* barrier, uint32_t parity) {
  races_.access(running_->actor, barrier, sizeof(uint64_t), barrier_use(false));
  Barrier& state = barrier_at(barrier);
  if ((state.phase & 1u) == (parity & 1u))
    return false;
  running_->actor.knowledge.join(state.completed);
  return true;
}

void Machine::issue(Copy copy) {
  copy.is_pending = true;
  copy.ticket = next_ticket_++;
  const uint64_t delay = draw_delay();
  copies_.push_back(std::move(copy));
  const size_t idx = copies_.size() - 1;
  if (delay == 0)
    arrive_copy(idx);
  else
    push_due({num_steps_ + delay, nullptr, idx, copies_[idx].ticket});
}

void Machine::bulk_load(std::byte* shared,
                        const std::byte* global,
                        uint32_t bytes,
                        uint64_t* barrier) {
  check_bulk(shared, global, bytes);
  races_.access(running_->actor, barrier, sizeof(uint64_t), barrier_use(true));
  Barrier& state = barrier_at(barrier);
  if (!state.is_fenced)
    races_.found(Kind::kProxy,
                 running_->actor,
                 concat("a bulk load on the barrier at ",
                        guest_.describe(barrier),
                        ", whose initialization was not fenced"));
  if (bytes == 0)
    return;
  Actor copy = copy_actor(state.slot, state.phase + 1);
  races_.access(copy, global, bytes, bulk(false));
  races_.access(copy, shared, bytes, bulk(true));
  ++state.num_in_flight;
  Copy load;
  load.to = shared;
  load.from = global;
  load.bytes = bytes;
  load.barrier = barrier;
  issue(std::move(load));
}

void Machine::bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
  check_bulk(shared, global, bytes);
  Thread* const thread = running_;
  if (!thread->has_bulk_stores) {
    thread->has_bulk_stores = true;
    Place place = thread->actor.place;
    place.label = "bulk stores of " + place.label;
    thread->write_slot = races_.make_actor(place).slot;
    thread->read_slot = races_.make_actor(place).slot;
  }
  if (bytes == 0)
    return;
  Actor reader = copy_actor(thread->read_slot, thread->group);
  races_.access(reader, shared, bytes, bulk(false));
  Actor writer = copy_actor(thread->write_slot, thread->group);
  races_.access(writer, global, bytes, bulk(true));
  Copy store;
  store.to = global;
  store.from = shared;
  store.bytes = bytes;
  store.thread = thread;
  store.group = thread->group;
  thread->has_open_group = true;
  issue(std::move(store));
}

void Machine::commit_bulk_stores() {
  ++running_->group;
  running_->has_open_group = false;
}

void Machine::read_source(Copy& copy) {
  if (copy.is_read)
    return;
  copy.is_read = true;
  const std::byte* const source = guest_.real(copy.from);
  copy.staged.assign(source, source + copy.bytes);
}

void Machine::arrive_copy(size_t idx) {
  Copy& copy = copies_[idx];
  copy.is_pending = false;
  read_source(copy);
  ++num_changes_;
  std::memcpy(guest_.real(copy.to), copy.staged.data(), copy.bytes);
  copy.staged.clear();
  if (copy.barrier == nullptr)
    return;
  Barrier& barrier = barriers_.at(copy.barrier);
  --barrier.num_in_flight;
  barrier.bytes_missing -= copy.bytes;
  complete_phases(barrier);
}

void Machine::finish_groups(Thread* thread, uint32_t last_group, bool is_reads_only) {
  for (size_t idx = 0; idx < copies_.size(); ++idx) {
    Copy& copy = copies_[idx];
    if (!copy.is_pending || copy.thread != thread || copy.group > last_group)
      continue;
    if (is_reads_only)
      read_source(copy);
    else
      arrive_copy(idx);
  }
}

void Machine::await_bulk_stores(int num_pending) {
  Thread* const thread = running_;
  const int64_t last = int64_t{thread->group} - 1 - num_pending;
  if (!thread->has_bulk_stores || last <= 0)
    return;
  const auto last_group = static_cast<uint32_t>(last);
  await_bulk_reads(num_pending);
  finish_groups(thread, last_group, false);
  thread->num_written = std::max(thread->num_written, last_group);
  Knowledge& knowledge = thread->actor.knowledge;
  knowledge.all.raise(thread->write_slot, last_group);
  knowledge.bulk.raise(thread->write_slot, last_group);
}

void Machine::await_bulk_reads(int num_pending) {
  Thread* const thread = running_;
  const int64_t last = int64_t{thread->group} - 1 - num_pending;
  if (!thread->has_bulk_stores || last <= 0)
    return;
  const auto last_group = static_cast<uint32_t>(last);
  finish_groups(thread, last_group, true);
  thread->num_read = std::max(thread->num_read, last_group);
  thread->actor.knowledge.all.raise(thread->read_slot, last_group);
}

void Machine::end_block(std::byte* shared, int64_t bytes) {
  // The place will be another block's.
  std::erase_if(words_, [&](const auto& entry) {
    const auto* const place = static_cast<const std::byte*>(entry.first);
    return place >= shared && place < shared + bytes;
  });
  for (auto entry = barriers_.begin(); entry != barriers_.end();) {
    const auto* const place = static_cast<const std::byte*>(entry->first);
    if (place < shared || place >= shared + bytes) {
      ++entry;
      continue;
    }
    if (entry->second.num_in_flight > 0 && running_ != nullptr)
      races_.found(Kind::kBulk,
                   running_->actor,
                   concat("the block ended while bulk loads to ",
                          guest_.describe(shared),
                          " were on their way"));
    entry = barriers_.erase(entry);
  }
}

}  // namespace moe::simt::checker
