// Puts: copies to ranks of other nodes that whatever joins nodes makes, with a signal behind each.

#include <cstring>

#include "core/error.h"
#include "schedules/machine.h"

namespace moe::simt::checker {

namespace {

Manner by_put(bool is_write, bool is_atomic) {
  Manner manner;
  manner.is_write = is_write;
  manner.is_atomic = is_atomic;
  manner.is_put = true;
  return manner;
}

}  // namespace

/// Two puts of a thread are of different actors: neither knows the other.
Actor Machine::put_actor(Thread* thread) {
  auto& actors = thread->put_actors;
  if (thread->num_open_puts == actors.size()) {
    Place place = thread->actor.place;
    place.label = "a put of " + place.label;
    actors.push_back(races_.make_actor(std::move(place)));
  }
  Actor& actor = actors[thread->num_open_puts++];
  return copy_actor(actor.slot, ++actor.step);
}

std::byte* Machine::on_peer(const void* address, int64_t bytes, int pe) {
  std::byte* const there = guest_.on_peer(address, bytes, running_->actor.place.rank_idx, pe);
  if (there == nullptr)
    races_.found(Kind::kBounds,
                 running_->actor,
                 concat("a put of ",
                        bytes,
                        " bytes to rank ",
                        pe,
                        " at ",
                        guest_.describe(address),
                        ", which is not symmetric memory of this rank"));
  return there;
}

void Machine::put_signal(
    int pe, std::byte* to, const std::byte* from, int64_t bytes, uint64_t* signal, uint64_t value) {
  drain(running_);
  Put put;
  put.signal = on_peer(signal, sizeof(uint64_t), pe);
  put.value = value;
  put.thread = running_;
  Actor actor = put_actor(running_);
  if (bytes > 0) {
    on_peer(from, bytes, pe);  // an engine sends from symmetric memory alone
    put.to = on_peer(to, bytes, pe);
    put.from = from;
    put.bytes = bytes;
    races_.access(actor, from, bytes, by_put(false, false));
    races_.access(actor, put.to, bytes, by_put(true, false));
  }
  races_.access(actor, put.signal, sizeof(uint64_t), by_put(true, true));
  put.word.is_put = true;
  put.word.message.is_set = true;
  put.word.message.knowledge = actor.knowledge;
  put.word.message.knowledge.all.raise(actor.slot, actor.step);
  put.word.message.rank_idx = actor.place.rank_idx;
  put.word.slot = actor.slot;
  put.word.step = actor.step;
  put.word.rank_idx = actor.place.rank_idx;
  const auto rank = static_cast<size_t>(actor.place.rank_idx);
  if (rank >= puts_of_.size())
    puts_of_.resize(rank + 1);
  ++puts_of_[rank].num_puts;
  puts_of_[rank].payload_bytes += bytes;
  puts_of_[rank].signal_bytes += static_cast<int64_t>(sizeof(uint64_t));
  put.is_pending = true;
  put.ticket = next_ticket_++;
  puts_.push_back(std::move(put));
  const size_t idx = puts_.size() - 1;
  // An engine reads the source whenever it likes.
  if (random_.chance(1, 3))
    read_source(puts_[idx]);
  // Networks are slower than stores.
  const uint64_t delay = draw_delay() * (1 + random_.below(8));
  if (delay == 0)
    arrive_put(idx);
  else
    push_due({num_steps_ + delay, nullptr, idx, puts_[idx].ticket, true});
}

void Machine::read_source(Put& put) {
  if (put.is_read || put.bytes == 0)
    return;
  put.is_read = true;
  const std::byte* const source = guest_.real(put.from);
  put.staged.assign(source, source + put.bytes);
}

void Machine::arrive_put(size_t idx) {
  Put& put = puts_[idx];
  put.is_pending = false;
  read_source(put);
  ++num_changes_;
  if (put.bytes > 0)
    std::memcpy(guest_.real(put.to), put.staged.data(), static_cast<size_t>(put.bytes));
  put.staged = {};
  std::memcpy(guest_.real(put.signal), &put.value, sizeof(put.value));
  words_[put.signal] = put.word;
}

void Machine::take_put(const uint64_t* signal) {
  const auto found = words_.find(signal);
  if (found != words_.end())
    races_.acquire(running_->actor, found->second.message, Order::kAcquire, Reach::kSystem);
}

void Machine::quiet() {
  Thread* const thread = running_;
  for (size_t idx = puts_.size(); thread->num_open_puts > 0 && idx > 0; --idx)
    if (puts_[idx - 1].is_pending && puts_[idx - 1].thread == thread)
      arrive_put(idx - 1);
  for (size_t i = 0; i < thread->num_open_puts; ++i) {
    const Actor& actor = thread->put_actors[i];
    thread->actor.knowledge.all.raise(actor.slot, actor.step);
  }
  thread->num_open_puts = 0;
}

Machine::Puts Machine::puts_of(int rank_idx) const {
  const auto rank = static_cast<size_t>(rank_idx);
  return rank < puts_of_.size() ? puts_of_[rank] : Puts();
}

}  // namespace moe::simt::checker
