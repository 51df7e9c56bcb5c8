#include "schedules/machine.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace moe::simt::checker {

namespace {

Machine* current_machine = nullptr;

bool is_later(const auto& left, const auto& right) {
  return left.step > right.step || (left.step == right.step && left.ticket > right.ticket);
}

bool is_release(Order order) {
  return order == Order::kRelease || order == Order::kAcquireRelease;
}

}  // namespace

Machine::Machine(uint64_t seed) : races_(guest_, findings_), random_(seed) {
  current_machine = this;
}

Machine::~Machine() {
  current_machine = nullptr;
}

Machine* Machine::current() {
  return current_machine;
}

void Machine::reset(uint64_t seed) {
  running_ = nullptr;
  threads_.clear();
  words_.clear();
  barriers_.clear();
  copies_.clear();
  puts_.clear();
  puts_of_.clear();
  due_.clear();
  findings_ = Findings();
  races_.reset();
  guest_.reset();
  random_ = Random(seed);
  num_steps_ = 0;
  num_changes_ = 0;
  next_ticket_ = 1;
}

Machine::Thread* Machine::make_thread(Place place) {
  threads_.push_back(std::make_unique<Thread>());
  threads_.back()->actor = races_.make_actor(std::move(place));
  return threads_.back().get();
}

void Machine::begin_thread(Thread* thread, Place place, const Knowledge& before) {
  races_.rename(thread->actor, std::move(place));
  thread->actor.knowledge = before;
  thread->actor.at_launch = thread->actor.knowledge.all;
  thread->actor.fenced = Message();
  thread->actor.unfenced.clear();
}

void Machine::end_thread(Thread* thread, Knowledge* after) {
  drain(thread);
  if (thread->has_open_group || (thread->has_bulk_stores && thread->num_read < thread->group - 1))
    races_.found(Kind::kBulk,
                 thread->actor,
                 "the thread ended while its bulk stores still read shared memory");
  if (thread->num_open_puts > 0)
    races_.found(Kind::kBulk,
                 thread->actor,
                 "the thread ended without quiet() while its puts read their sources");
  after->join(races_.close(thread->actor));
}

Knowledge Machine::knowledge_of(Thread* thread) {
  drain(thread);
  return races_.close(thread->actor);
}

void Machine::learn(Thread* thread, const Knowledge& knowledge) {
  thread->actor.knowledge.join(knowledge);
}

// --- Stores on their way -----------------------------------------------------------------------

bool Machine::overlaps(const Pending& store, const void* address, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(address);
  return store.is_pending && store.to < begin + bytes && begin < store.to + store.bytes;
}

uint64_t Machine::draw_delay() {
  if (!random_.chance(delays_.num_of_8, 8))
    return 0;
  // Mostly soon, now and then much later.
  const uint32_t most = random_.chance(1, 8) ? delays_.most_steps * 16 : delays_.most_steps;
  return 1 + random_.below(most);
}

void Machine::push_due(Due due) {
  due_.push_back(due);
  std::push_heap(due_.begin(), due_.end(), is_later<Due, Due>);
}

void Machine::step() {
  ++num_steps_;
  if (!due_.empty() && due_.front().step <= num_steps_)
    arrive_due();
}

void Machine::arrive_due() {
  while (!due_.empty() && due_.front().step <= num_steps_)
    arrive_any();
}

bool Machine::arrive_any() {
  while (!due_.empty()) {
    std::pop_heap(due_.begin(), due_.end(), is_later<Due, Due>);
    const Due due = due_.back();
    due_.pop_back();
    if (due.thread != nullptr) {
      auto& stores = due.thread->stores;
      if (due.idx >= stores.size() || stores[due.idx].ticket != due.ticket ||
          !stores[due.idx].is_pending)
        continue;
      arrive(due.thread, due.idx);
    } else if (due.is_put) {
      if (puts_[due.idx].ticket != due.ticket || !puts_[due.idx].is_pending)
        continue;
      arrive_put(due.idx);
    } else {
      if (copies_[due.idx].ticket != due.ticket || !copies_[due.idx].is_pending)
        continue;
      arrive_copy(due.idx);
    }
    return true;
  }
  return false;
}

void Machine::arrive(Thread* thread, size_t idx) {
  auto& stores = thread->stores;
  if (!stores[idx].is_pending)
    return;
  for (size_t earlier = 0; earlier < idx; ++earlier)
    if (stores[earlier].is_pending &&
        (stores[idx].is_release || overlaps(stores[earlier], stores[idx].to, stores[idx].bytes)))
      arrive(thread, earlier);
  stores[idx].is_pending = false;
  perform(stores[idx]);
  if (--thread->num_pending == 0)
    stores.clear();
}

void Machine::drain(Thread* thread) {
  for (size_t idx = 0; thread->num_pending > 0 && idx < thread->stores.size(); ++idx)
    arrive(thread, idx);
}

void Machine::drain_overlapping(Thread* thread, const void* address, size_t bytes) {
  for (size_t idx = 0; thread->num_pending > 0 && idx < thread->stores.size(); ++idx)
    if (overlaps(thread->stores[idx], address, bytes))
      arrive(thread, idx);
}

void Machine::perform(const Pending& store) {
  ++num_changes_;
  std::memcpy(guest_.real(store.to), store.value, store.bytes);
  if (store.is_atomic)
    set_word(store);
}

void Machine::hold_back(Pending store) {
  store.ticket = next_ticket_++;
  const uint64_t delay = draw_delay();
  Thread* const thread = running_;
  thread->stores.push_back(std::move(store));
  ++thread->num_pending;
  const size_t idx = thread->stores.size() - 1;
  if (delay == 0)
    arrive(thread, idx);
  else
    push_due({num_steps_ + delay, thread, idx, thread->stores[idx].ticket});
}

// --- Ordinary accesses -------------------------------------------------------------------------

void Machine::load(const void* from, void* value, size_t bytes, bool is_constant) {
  Manner manner;
  manner.is_constant = is_constant;
  races_.access(running_->actor, from, static_cast<int64_t>(bytes), manner);
  if (running_->num_pending > 0)
    drain_overlapping(running_, from, bytes);
  std::memcpy(value, guest_.real(from), bytes);
}

void Machine::store(void* to, const void* value, size_t bytes) {
  Manner manner;
  manner.is_write = true;
  races_.access(running_->actor, to, static_cast<int64_t>(bytes), manner);
  Pending store{};
  store.to = static_cast<std::byte*>(to);
  store.bytes = static_cast<uint32_t>(bytes);
  store.is_pending = true;
  std::memcpy(store.value, value, bytes);
  if (guest_.find(to, 1)->ownership == Ownership::kShared)
    perform(store);
  else
    hold_back(std::move(store));
}

// --- Words -------------------------------------------------------------------------------------

void Machine::check_word(const Word& word, Reach reach, const void* address, bool is_write) {
  const Actor& actor = running_->actor;
  if (RaceChecker::knows(actor, word.slot, word.step))
    return;
  Place writer;
  writer.rank_idx = word.rank_idx;
  writer.block = word.block;
  writer.is_host = word.is_host;
  const Place& own = actor.place;
  const bool is_written_for_it = reaches(word.reach, writer, own.rank_idx, own.block, own.is_host);
  const bool is_looked_at_there = reaches(reach, own, word.rank_idx, word.block, word.is_host);
  if (is_written_for_it && is_looked_at_there)
    return;
  races_.found(Kind::kScope,
               actor,
               concat("the scope of ",
                      is_written_for_it ? "this" : "the earlier write's",
                      is_written_for_it ? (is_write ? " atomic write" : " atomic read") : "",
                      " at ",
                      guest_.describe(address),
                      " does not reach the other side; last written by ",
                      races_.describe(word.slot, word.step)));
}

void Machine::set_word(const Pending& store) {
  Word& word = words_[store.to];
  word.message = store.message;
  word.slot = store.slot;
  word.step = store.step;
  word.reach = store.reach;
  word.rank_idx = store.message.rank_idx;
  word.block = store.message.block;
  word.is_host = store.message.is_host;
  word.is_put = false;
}

bool Machine::is_behind(const void* flag, const void* word) const {
  const Word& first = words_.at(word);
  return words_.at(flag).message.knowledge.all.at(first.slot) >= first.step;
}

uint64_t Machine::atomic_load(const void* from, size_t bytes, Order order, Reach reach) {
  Manner manner;
  manner.is_atomic = true;
  races_.access(running_->actor, from, static_cast<int64_t>(bytes), manner);
  if (running_->num_pending > 0)
    drain_overlapping(running_, from, bytes);
  uint64_t value = 0;
  std::memcpy(&value, guest_.real(from), bytes);
  const auto found = words_.find(from);
  if (found != words_.end()) {
    check_word(found->second, reach, from, false);
    if (!found->second.is_put)
      races_.acquire(running_->actor, found->second.message, order, reach);
  }
  return value;
}

void Machine::atomic_store(void* to, uint64_t value, size_t bytes, Order order, Reach reach) {
  Manner manner;
  manner.is_write = true;
  manner.is_atomic = true;
  Actor& actor = running_->actor;
  races_.access(actor, to, static_cast<int64_t>(bytes), manner);
  const auto found = words_.find(to);
  if (found != words_.end())
    check_word(found->second, reach, to, true);
  Pending store{};
  store.to = static_cast<std::byte*>(to);
  store.bytes = static_cast<uint32_t>(bytes);
  store.is_atomic = true;
  store.is_release = is_release(order);
  store.is_pending = true;
  std::memcpy(store.value, &value, bytes);
  store.slot = actor.slot;
  store.step = actor.step;
  store.reach = reach;
  store.message = races_.release(actor, order, reach);
  hold_back(std::move(store));
}

uint64_t Machine::atomic_add(void* to, uint64_t value, size_t bytes, Order order, Reach reach) {
  Manner manner;
  manner.is_write = true;
  manner.is_atomic = true;
  Actor& actor = running_->actor;
  races_.access(actor, to, static_cast<int64_t>(bytes), manner);
  if (is_release(order))
    drain(running_);
  else
    drain_overlapping(running_, to, bytes);
  Pending store{};
  store.to = static_cast<std::byte*>(to);
  store.bytes = static_cast<uint32_t>(bytes);
  store.is_atomic = true;
  store.slot = actor.slot;
  store.step = actor.step;
  store.reach = reach;
  const auto found = words_.find(to);
  Message earlier;
  if (found != words_.end()) {
    check_word(found->second, reach, to, true);
    races_.acquire(actor, found->second.message, order, reach);
    earlier = found->second.message;
  }
  store.message = races_.release(actor, order, reach);
  if (earlier.is_set) {
    // A release sequence: acquirers synchronize with those before, too.
    store.message.knowledge.join(earlier.knowledge);
    store.message.reach =
        store.message.is_set ? std::min(store.message.reach, earlier.reach) : earlier.reach;
    store.message.is_set = true;
  }
  uint64_t before = 0;
  std::memcpy(&before, guest_.real(to), bytes);
  const uint64_t sum = before + value;
  std::memcpy(store.value, &sum, bytes);
  perform(store);
  return before;
}

void Machine::fence(Reach reach) {
  drain(running_);
  races_.fence(running_->actor, reach);
}

void Machine::fence_proxy(Space space) {
  drain(running_);
  races_.fence_proxy(running_->actor, space);
}

void Machine::meet(Thread* const* threads, int num_threads) {
  std::vector<Actor*> actors(static_cast<size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) {
    drain(threads[i]);
    actors[static_cast<size_t>(i)] = &threads[i]->actor;
  }
  races_.meet(actors.data(), num_threads);
}

}  // namespace moe::simt::checker
