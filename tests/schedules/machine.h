#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schedules/finding.h"
#include "schedules/guest_memory.h"
#include "schedules/race_checker.h"
#include "schedules/random.h"
#include "simt/memory.h"

namespace moe::simt::checker {

/// Times that stores and bulk copies stay on their way; drawn from the seed.
struct Delays {
  uint32_t num_of_8 = 4;     ///< how many of eight stores are held back
  uint32_t most_steps = 64;  ///< accesses of all threads until a store has arrived
};

/// Memory of all ranks as emulated threads see it: performs every access, late where the model
/// allows it, and checks it.
///
/// Order of one thread's stores: those that overlap stay in order; a release, a fence and a barrier
/// let everything before them arrive first; all else arrives in any order.
class Machine {
 public:
  explicit Machine(uint64_t seed);
  ~Machine();

  /// The machine whose threads run; memory.h acts on it.
  static Machine* current();

  GuestMemory& guest() { return guest_; }
  RaceChecker& races() { return races_; }
  Findings& findings() { return findings_; }
  Random& random() { return random_; }
  void set_delays(Delays delays) { delays_ = delays; }

  /// Begins another schedule: nothing is left of the last.
  void reset(uint64_t seed);

  /// A thread by itself: of the host, or of a test.
  struct Thread;
  Thread* make_thread(Place place);
  /// From now on @p thread is who accesses memory, until another is.
  void enter(Thread* thread) { running_ = thread; }
  Thread* running() const { return running_; }

  /// A kernel's thread begins, in the place of one of an earlier kernel of its stream, whose end
  /// @p before comes after.
  void begin_thread(Thread* thread, Place place, const Knowledge& before);
  /// Knowledge that it leaves for whoever follows. Its stores have arrived.
  void end_thread(Thread* thread, Knowledge* after);
  /// Knowledge of @p thread about what it has done, for a kernel that it launches or a thread that
  /// it starts.
  Knowledge knowledge_of(Thread* thread);
  void learn(Thread* thread, const Knowledge& knowledge);
  /// The barriers for bulk copies of a block are gone with its shared memory.
  void end_block(std::byte* shared, int64_t bytes);

  // --- memory.h --------------------------------------------------------------------------------
  void load(const void* from, void* value, size_t bytes, bool is_constant);
  void store(void* to, const void* value, size_t bytes);
  uint64_t atomic_load(const void* from, size_t bytes, Order order, Reach reach);
  void atomic_store(void* to, uint64_t value, size_t bytes, Order order, Reach reach);
  uint64_t atomic_add(void* to, uint64_t value, size_t bytes, Order order, Reach reach);
  void fence(Reach reach);
  void fence_proxy(Space space);
  void init_mbarrier(uint64_t* barrier, int num_arrivals);
  void fence_mbarrier_init();
  void arrive_expect(uint64_t* barrier, uint32_t bytes);
  bool try_wait(uint64_t* barrier, uint32_t parity);
  void bulk_load(std::byte* shared, const std::byte* global, uint32_t bytes, uint64_t* barrier);
  void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes);
  void commit_bulk_stores();
  void await_bulk_stores(int num_pending);
  void await_bulk_reads(int num_pending);
  void put_signal(int pe,
                  std::byte* to,
                  const std::byte* from,
                  int64_t bytes,
                  uint64_t* signal,
                  uint64_t value);
  void take_put(const uint64_t* signal);
  void quiet();
  void meet(Thread* const* threads, int num_threads);

  // --- Arrival of what is on its way -----------------------------------------------------------
  /// One more access: what is due arrives.
  void step();
  uint64_t num_steps() const { return num_steps_; }
  /// Lets something that is on its way arrive. False when nothing is.
  bool arrive_any();
  /// Payload and signals that kernels of a rank have put, in bytes, and how many puts.
  struct Puts {
    int64_t num_puts = 0;
    int64_t payload_bytes = 0;
    int64_t signal_bytes = 0;
  };
  Puts puts_of(int rank_idx) const;
  /// Returns whether the release that wrote @p flag last came behind the store that wrote @p word
  /// last, so that the flag waited for it.
  bool is_behind(const void* flag, const void* word) const;
  /// Number of changes of memory; tells waiting from standing still.
  uint64_t num_changes() const { return num_changes_; }

 private:
  struct Pending;
  struct Word;
  struct Barrier;
  struct Copy;
  struct Put;
  struct Due {
    uint64_t step;
    Thread* thread;   ///< of a store, or null
    size_t idx;       ///< of the store in its thread, or of the copy
    uint64_t ticket;  ///< of what is due; another one may have taken its place since
    bool is_put = false;
  };

  static bool overlaps(const Pending& store, const void* address, size_t bytes);
  uint64_t draw_delay();
  void push_due(Due due);
  void arrive_due();
  void arrive(Thread* thread, size_t idx);
  void drain(Thread* thread);
  void drain_overlapping(Thread* thread, const void* address, size_t bytes);
  void hold_back(Pending store);
  void perform(const Pending& store);
  void check_word(const Word& word, Reach reach, const void* address, bool is_write);
  void set_word(const Pending& store);

  Actor copy_actor(uint32_t slot, uint32_t step);
  void check_bulk(const void* shared, const void* global, uint32_t bytes);
  Barrier& barrier_at(const uint64_t* barrier);
  void complete_phases(Barrier& barrier);
  void issue(Copy copy);
  void read_source(Copy& copy);
  void arrive_copy(size_t idx);
  Actor put_actor(Thread* thread);
  std::byte* on_peer(const void* address, int64_t bytes, int pe);
  void read_source(Put& put);
  void arrive_put(size_t idx);
  void finish_groups(Thread* thread, uint32_t last_group, bool is_reads_only);

  GuestMemory guest_;
  Findings findings_;
  RaceChecker races_;
  Random random_;
  Delays delays_;
  Thread* running_ = nullptr;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::unordered_map<const void*, Word> words_;
  std::unordered_map<const void*, Barrier> barriers_;
  std::vector<Copy> copies_;
  std::vector<Put> puts_;
  std::vector<Puts> puts_of_;  ///< by rank
  std::vector<Due> due_;       ///< a heap, the earliest first
  uint64_t num_steps_ = 0;
  uint64_t num_changes_ = 0;
  uint64_t next_ticket_ = 1;
};

/// A store on its way.
struct Machine::Pending {
  std::byte* to;
  uint32_t bytes;
  bool is_atomic;
  bool is_release;
  bool is_pending;
  uint64_t ticket;
  std::byte value[16];
  Message message;  ///< of an atomic store
  uint32_t slot;    ///< who stores, and when
  uint32_t step;
  Reach reach;
};

struct Machine::Thread {
  Actor actor;
  std::vector<Pending> stores;
  size_t num_pending = 0;

  // Its bulk stores: groups 1, 2, ...; `group` is the one that is open.
  bool has_bulk_stores = false;
  uint32_t write_slot = 0;
  uint32_t read_slot = 0;
  uint32_t group = 1;
  bool has_open_group = false;
  uint32_t num_read = 0;                     ///< groups whose sources are free
  uint32_t num_written = 0;                  ///< groups that have arrived
  std::vector<uint64_t*> unfenced_barriers;  ///< that it has initialized

  /// Actors of its puts: the i-th since its last quiet() uses entry i, each time with a later step.
  std::vector<Actor> put_actors;
  size_t num_open_puts = 0;
};

/// Last writer of a word, and what acquirers learn.
struct Machine::Word {
  Message message;
  uint32_t slot = 0;
  uint32_t step = 0;
  Reach reach = Reach::kSystem;
  int rank_idx = -1;
  int64_t block = -1;
  bool is_host = false;
  bool is_put = false;  ///< its acquirers learn of the put when they take it
};

struct Machine::Barrier {
  int num_arrivals = 0;
  int num_missing = 0;
  int64_t bytes_missing = 0;
  uint32_t phase = 0;
  uint32_t slot = 0;
  bool is_fenced = false;
  int num_in_flight = 0;
  Knowledge arrived;
  Knowledge completed;
};

/// A bulk copy on its way.
struct Machine::Copy {
  bool is_pending = false;
  bool is_read = false;
  uint64_t ticket = 0;
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  uint32_t bytes = 0;
  uint64_t* barrier = nullptr;  ///< of a load
  Thread* thread = nullptr;     ///< of a store, with its group
  uint32_t group = 0;
  std::vector<std::byte> staged;
};

/// A put on its way.
struct Machine::Put {
  bool is_pending = false;
  bool is_read = false;
  uint64_t ticket = 0;
  std::byte* to = nullptr;  ///< on the peer
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  std::byte* signal = nullptr;  ///< on the peer
  uint64_t value = 0;
  Word word;  ///< what the signal lets acquirers know
  Thread* thread = nullptr;
  std::vector<std::byte> staged;
};

}  // namespace moe::simt::checker
