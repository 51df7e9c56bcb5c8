#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "schedules/finding.h"
#include "schedules/guest_memory.h"
#include "schedules/vector_clock.h"
#include "simt/memory.h"

namespace moe::simt::checker {

/// Place where a thread runs, for messages and for what a scope reaches.
struct Place {
  int rank_idx = -1;   ///< -1: the host of all ranks
  int64_t block = -1;  ///< unique among blocks that run at the same time; -1 for a host thread
  int block_idx = 0;
  int thread_idx = 0;
  bool is_host = false;
  std::string label;  ///< kernel, or what a host thread does
};

/// A word's latest release, for whoever acquires it.
struct Message {
  bool is_set = false;
  Knowledge knowledge;
  Reach reach = Reach::kSystem;
  int rank_idx = -1;
  int64_t block = -1;
  bool is_host = false;
};

/// A thread, or bulk copies of a thread or barrier, as the checker sees it.
struct Actor {
  uint32_t slot = 0;
  uint32_t step = 1;  ///< of its accesses now; rises with everything that others can wait for
  Knowledge knowledge;
  Place place;
  Clock at_launch;                ///< what happened before its kernel began
  Message fenced;                 ///< what its last fence would release with a relaxed store
  std::vector<Message> unfenced;  ///< seen by relaxed loads since its last fence
  bool is_copy = false;           ///< copies of one slot are not ordered among themselves
};

/// Ways in which bytes are touched.
struct Manner {
  bool is_write = false;
  bool is_atomic = false;
  bool is_bulk = false;
  bool is_put = false;       ///< by what joins nodes
  bool is_constant = false;  ///< as if nobody wrote while the kernel runs
};

/// Happens-before between every two accesses of a byte, in whatever order they were performed.
///
/// Model: vector clocks (Lamport; FastTrack, Flanagan and Freund 2009, for the epochs of accesses),
/// scopes and proxies after the PTX memory consistency model.
class RaceChecker {
 public:
  RaceChecker(GuestMemory& memory, Findings& findings);

  void reset();

  /// A new actor. Its past is empty.
  Actor make_actor(Place place);
  /// The next kernel's thread takes over the slot of one that has ended.
  void rename(Actor& actor, Place place);

  /// One access of @p bytes at @p address by @p actor. Tells the region's counters. False when it
  /// is outside what the actor may touch: it must then not be performed.
  bool access(Actor& actor, const void* address, int64_t bytes, Manner manner);

  /// Returns whether what @p write_slot did at @p write_step happened before what @p actor does
  /// now.
  static bool knows(const Actor& actor, uint32_t write_slot, uint32_t write_step) {
    return (write_slot == actor.slot && !actor.is_copy) ||
           actor.knowledge.all.at(write_slot) >= write_step;
  }

  /// @return what a store of that order lets acquirers know.
  Message release(Actor& actor, Order order, Reach reach);
  void acquire(Actor& actor, const Message& message, Order order, Reach reach);
  void fence(Actor& actor, Reach reach);
  void fence_proxy(Actor& actor, Space space);

  /// All of @p actors have met.
  void meet(Actor* const* actors, int num_actors);
  /// Knowledge of a kernel's threads on @p rank_idx that begins after @p earlier, kernel boundary
  /// between them. Bulk copies of what peers wrote need a proxy fence still.
  Knowledge behind_launch(const Knowledge& earlier, int rank_idx) const;
  /// Everything an actor knows, its own steps too.
  Knowledge close(Actor& actor);

  /// Nobody has accessed [@p address, + @p bytes) any more: the memory is another's.
  void forget(const std::byte* address, int64_t bytes);

  [[noreturn]] void found(Kind kind, const Actor& actor, const std::string& text);
  std::string name(const Actor& actor) const { return describe(actor.slot, actor.step); }
  std::string describe(uint32_t slot, uint32_t step) const;

 private:
  static constexpr uint32_t kNone = 0;

  struct Access {
    uint32_t step;
    uint16_t slot;
    uint16_t mask;
    uint32_t next;
    bool is_atomic;
    bool is_bulk;
  };
  struct Granule {
    uint32_t writes = kNone;
    uint32_t reads = kNone;
  };
  struct Naming {
    uint32_t from_step;
    Place place;
  };

  static bool knows(const Actor& actor, const Access& access) {
    return knows(actor, access.slot, access.step);
  }
  bool check_bounds(Actor& actor, const void* address, int64_t bytes, Manner manner);
  void touch(Actor& actor, int64_t granule_idx, uint16_t mask, Manner manner, const Region& region);
  void check_proxy(const Actor& actor,
                   const Access& write,
                   int64_t granule_idx,
                   Manner manner,
                   const Region& region);
  void note(Actor& actor, uint32_t* list, uint16_t mask, Manner manner);
  /// Takes @p mask out of the accesses of @p list that @p actor knows.
  void forget(const Actor& actor, uint32_t* list, uint16_t mask);
  void report_race(const Actor& actor,
                   int64_t granule_idx,
                   uint16_t mask,
                   Manner manner,
                   const Access& other,
                   bool is_other_write);
  uint32_t obtain();

  GuestMemory& memory_;
  Findings& findings_;
  std::vector<Granule> granules_;
  std::vector<Access> accesses_;  ///< [0] stands for none
  uint32_t free_ = kNone;
  std::vector<std::vector<Naming>> names_;  ///< by slot
};

/// Returns whether a scope of @p place reaches a thread on @p rank_idx and @p block.
bool reaches(Reach reach, const Place& place, int rank_idx, int64_t block, bool is_host);

}  // namespace moe::simt::checker
