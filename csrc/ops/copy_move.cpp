#include <algorithm>

#include "ops/copy_run.h"

// The data: one loop that fills slots of peers, empties its own, and writes in place between.

namespace moe::ops {

namespace {

// Between parts of this size a rank looks at its slots, its peers and its signals.
constexpr int64_t kDirectPartBytes = int64_t{1} << 20;

}  // namespace

/// A stream through slots: of this rank to those that read them, or of a peer to this rank.
struct CopyRun::Channel {
  const std::vector<int>& peers;  ///< peers that read them; or the one that fills them
  bool is_outgoing;
  const CopyStream& stream;
  layout::CopySlots slots;
  int64_t num_slots;
  int64_t num_slots_needed;
  int64_t num_moved = 0;  ///< slots filled or emptied

  bool is_complete() const { return num_moved == num_slots_needed; }
};

/// Part that is copied between two looks around: a slot of a channel, or of the direct stream.
struct CopyRun::Part {
  Channel* channel = nullptr;  ///< null for a part of the direct stream
  int64_t idx = 0;             ///< number of the slot in its stream, or of the part
};

std::vector<CopyRun::Channel> CopyRun::open_channels(const PreparedCopies::Route& route) {
  std::vector<Channel> channels;
  const auto open = [&](const PreparedCopies::SlotStream& slots,
                        bool is_outgoing,
                        std::byte* base,
                        const Offer& offer) {
    const int64_t slot_bytes = engine_.config().slot_bytes;
    const auto bytes = static_cast<int64_t>(offer.bytes);
    channels.push_back(
        {slots.peers,
         is_outgoing,
         slots.stream,
         {base, group_.num_ranks()},
         // Both ends count them so; those of a single slot may end before it does.
         std::max<int64_t>(
             1, (bytes - layout::CopySlots::header_bytes(group_.num_ranks())) / slot_bytes),
         (slots.stream.end() + slot_bytes - 1) / slot_bytes});
  };
  // Slots that have come are emptied first, so that their sender can go on.
  auto incoming = route.incoming.begin();
  for_active_peers([&](int peer_rank) {
    for (const layout::OfferedSlots& offered : offered_here_[static_cast<size_t>(peer_rank)])
      open(*incoming++,
           false,
           group_.resolve(peer_rank, offered.slots, site(layout::Phase::kData)),
           offered.slots);
  });
  for (size_t i = 0; i < own_slots_.size(); ++i)
    open(route.outgoing[i], true, own_slots_[i]->data(), own_slots_[i]->offer());
  return channels;
}

/// Number of slots of an outgoing @p channel that @p reader has emptied.
int64_t CopyRun::num_emptied(const Channel& channel, int reader) const {
  const uint64_t word = sync::load_acquire(channel.slots.emptied(reader).value);
  return static_cast<int64_t>(layout::count_in_epoch(word, epoch_));
}

/// Number of slots of @p channel that can be moved now.
int64_t CopyRun::ready_slots(const Channel& channel) const {
  if (!channel.is_outgoing) {
    const uint64_t word = sync::load_acquire(channel.slots.filled().value);
    return static_cast<int64_t>(layout::count_in_epoch(word, epoch_)) - channel.num_moved;
  }
  int64_t limit = channel.num_slots_needed;
  for (const int reader : channel.peers)
    limit = std::min(limit, num_emptied(channel, reader) + channel.num_slots);
  return limit - channel.num_moved;
}

/// Returns whether @p channel waits for @p peer_rank where no slot of it can be moved.
bool CopyRun::awaits(const Channel& channel, int peer_rank) const {
  const auto& peers = channel.peers;
  return !channel.is_complete() &&
         std::find(peers.begin(), peers.end(), peer_rank) != peers.end() &&
         (!channel.is_outgoing ||
          num_emptied(channel, peer_rank) + channel.num_slots <= channel.num_moved);
}

void CopyRun::copy_part(const PreparedCopies::Route& route, const Part& part, cpu::StoreMode mode) {
  const cpu::RowKernels& kernels = engine_.kernels();
  if (part.channel == nullptr) {
    const int64_t begin = part.idx * kDirectPartBytes;
    const int64_t end = std::min(begin + kDirectPartBytes, route.direct.end());
    route.direct.copy(kernels, begin, end, mode, with_checksums_);
    kernels.store_fence();
    return;
  }
  const Channel& channel = *part.channel;
  const int64_t slot_bytes = engine_.config().slot_bytes;
  const int64_t begin = part.idx * slot_bytes;
  const int64_t end = std::min(begin + slot_bytes, channel.stream.end());
  std::byte* slot = channel.slots.data() + part.idx % channel.num_slots * slot_bytes;
  if (channel.is_outgoing) {
    channel.stream.pack(kernels, begin, end, slot, with_checksums_);
    return;
  }
  channel.stream.unpack(kernels, begin, end, slot, mode);
  kernels.store_fence();
}

/// Tells the peers of a channel that a slot was filled or emptied; slots of a channel in order.
void CopyRun::end_part(const Part& part) {
  progress();
  if (part.channel == nullptr)
    return;
  Channel& channel = *part.channel;
  channel.num_moved = part.idx + 1;
  layout::Word& word =
      channel.is_outgoing ? channel.slots.filled() : channel.slots.emptied(group_.rank_idx());
  sync::store_release(word.value,
                      layout::count_word(epoch_, static_cast<uint64_t>(channel.num_moved)));
  sync::fence_seq_cst();
  for (const int peer_rank : channel.peers)
    sync::wake(group_.doorbell(peer_rank));
}

void CopyRun::move(PreparedCopies::Route& route) {
  std::vector<Channel> channels = open_channels(route);
  int64_t total_bytes = route.direct.end();
  for (const Channel& channel : channels)
    total_bytes += channel.stream.end();
  const cpu::StoreMode mode =
      cpu::store_mode_of_copies(total_bytes * group_.num_ranks(), engine_.cache_bytes());
  const int64_t num_direct = (route.direct.end() + kDirectPartBytes - 1) / kDirectPartBytes;
  const int num_threads = group_.num_threads();
  int64_t next_direct = 0;
  const auto is_ready = [&] {
    return std::any_of(channels.begin(), channels.end(), [&](const Channel& channel) {
      return ready_slots(channel) > 0;
    });
  };
  const auto is_awaited = [&](int peer_rank) {
    return std::any_of(channels.begin(), channels.end(), [&](const Channel& channel) {
      return awaits(channel, peer_rank);
    });
  };
  std::vector<Part> parts;
  while (true) {
    parts.clear();
    for (Channel& channel : channels)
      for (int64_t ready = ready_slots(channel), i = 0; i < ready; ++i)
        parts.push_back({&channel, channel.num_moved + i});
    for (int i = 0; i < num_threads && next_direct < num_direct; ++i)
      parts.push_back({nullptr, next_direct++});
    if (parts.empty()) {
      if (std::all_of(channels.begin(), channels.end(), [](const Channel& channel) {
            return channel.is_complete();
          }))
        return;
      await_entered(layout::Phase::kData, is_ready, is_awaited);
      continue;
    }
    if (interrupt_check_)
      interrupt_check_();
    group_.check_abort();
    if (num_threads == 1) {
      for (const Part& part : parts) {
        copy_part(route, part, mode);
        end_part(part);
      }
      continue;
    }
    engine_.threads().parallel_for(static_cast<int64_t>(parts.size()),
                                   [&](int64_t begin, int64_t end) {
                                     for (int64_t i = begin; i < end; ++i)
                                       copy_part(route, parts[static_cast<size_t>(i)], mode);
                                   });
    for (const Part& part : parts)
      end_part(part);
  }
}

void CopyRun::await_done(const PreparedCopies::Route& route) {
  for_active_peers([&](int peer_rank) {
    if (route.writes_here[static_cast<size_t>(peer_rank)] != 0)
      await_entered(
          layout::Phase::kData,
          [&] { return !is_missing(peer_rank); },
          [&](int awaited_rank) { return is_missing(awaited_rank); });
  });
}

}  // namespace moe::ops
