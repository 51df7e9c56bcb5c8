#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/sync.h"
#include "kernels/exchange.h"
#include "kernels/receive.h"
#include "ops/dispatch.h"
#include "ops/endpoint_base.h"
#include "runtime/captured_memory.h"
#include "runtime/device.h"
#include "runtime/device_memory.h"
#include "runtime/device_watch.h"
#include "runtime/internode.h"
#include "runtime/launch_shape.h"
#include "runtime/mailbox.h"
#include "runtime/segment_bases.h"
#include "runtime/verdict_ring.h"
#include "runtime/window_ring.h"

namespace moe::runtime {

class DeferredAgreement;
class ReceivePhase;

/// Kinds of memory of captured operations; see CapturedMemory.
enum CapturedKind : int64_t { kCapturedRows = -8, kCapturedScratch, kCapturedSums };

/// An operation in which no row moved, as every rank found.
struct RefusedOperation {
  uint64_t epoch = 0;  ///< 0 for none
  std::string text;    ///< of what was found wrong, in it or the operation that it was refused for
};

struct DeviceEndpointConfig {
  ops::EndpointConfig common;
  LaunchShape shape;
  InternodeConfig internode;
};

/// One buffer on one rank whose rows kernels move; see EndpointBase.
///
/// Its kernels share one stream, so that they run in the order of the operations. Peers write into
/// two control areas: one in the heap of the group, which the host reads (activity and closed flags
/// only), and one in the memory of the device, with the ring of rows and flags.
class DeviceEndpoint : public ops::EndpointBase {
 public:
  /// Collective.
  /// @param memory  The heap that kernels address; of the same communicator tree as @p group.
  /// @throws InvalidArgument  configurations differ; names both values, on every rank. Or ranks lie
  ///   on several nodes and @p config has nothing that reaches them.
  static std::shared_ptr<DeviceEndpoint> create(std::shared_ptr<group::Group> group,
                                                std::shared_ptr<SymmetricMemory> memory,
                                                std::shared_ptr<Device> device,
                                                DeviceEndpointConfig config,
                                                const group::InterruptCheck& interrupt_check);
  ~DeviceEndpoint() override;

  SymmetricMemory& memory() const override { return *memory_; }
  std::shared_ptr<Window> take_window(uint64_t bytes, bool is_captured) override;
  std::shared_ptr<Window> take_captured_window(int64_t kind, uint64_t bytes);
  /// Makes it DeviceReplicas. Waits for no kernel.
  void balance_replicas(std::shared_ptr<const layout::Replicas> replicas) override;
  int32_t dlpack_device_type() const override { return device_->dlpack_type(); }
  int32_t device_idx() const override { return device_->device_idx(); }
  bool spans_devices() const override { return spans_devices_; }
  bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale) const override {
    return kernels::can_quantize(format, scale);
  }
  bool is_idle() const override;
  void restart(uint64_t next_epoch) override;
  Epochs epochs() const override;
  ops::WaitStatistics wait_statistics() const override;
  /// Nanoseconds that kernels have waited for every rank since the last call, [num_ranks].
  /// Called by the thread that issues operations.
  std::vector<int64_t> take_waited_ns();

  Device& device() const { return *device_; }
  /// The stream of this buffer's kernels.
  Stream& stream() const { return *stream_; }
  bool is_host_caller() const override { return device_->has_host_caller(); }
  std::shared_ptr<void> keep_inputs(std::shared_ptr<void> inputs) override {
    return device_->keep(std::move(inputs));
  }

  /// The caller's stream for operations issued from now on, by the number Python knows it by. Waits
  /// for those still on the progress thread, which belong to another stream.
  void set_caller_stream(uintptr_t handle, const group::InterruptCheck& interrupt_check);
  /// For local work that is the caller's alone; the default stream where none was set.
  Stream& caller_stream() const { return *shared_caller_stream(); }
  const std::shared_ptr<Stream>& shared_caller_stream() const;
  std::shared_ptr<const void> mark_caller() override;
  /// Kernels launched from now on run after what the caller's stream holds, or held at @p mark.
  void wait_for_caller(const void* mark = nullptr);
  /// The same of kernels that are captured. In every run the first of them go behind what the
  /// buffer was given before, by the order of the host's calls.
  void enter_capture();
  /// Makes later work of @p caller run after the kernels captured so far, and so, behind
  /// a run of the graph, further operations of the buffer, in whichever streams.
  void leave_capture(Stream& caller);
  /// Makes later work of the caller's stream run after @p end, which was recorded in the
  /// stream.
  void make_caller_wait(const Event& end);
  /// Puts off until somebody joins that @p caller waits for @p end.
  static std::shared_ptr<ops::DeferredJoin> join_caller(std::shared_ptr<Stream> caller,
                                                        std::shared_ptr<Event> end);

  /// The last operation is a dispatch that has sent and is yet to receive.
  void leave_to_receive(std::shared_ptr<ReceivePhase> phase);
  /// Before the next operation; see ReceivePhase::settle().
  void settle_receive(const group::InterruptCheck& interrupt_check);

  /// Operations whose rows the host has not heard.
  VerdictRing<DeferredAgreement>& verdicts() { return verdicts_; }
  const VerdictRing<DeferredAgreement>& verdicts() const { return verdicts_; }
  /// Numbers of operations of this rank: from 1 on, one after the other.
  uint64_t take_operation_number() { return ++last_number_; }
  /// Before operation @p number: waits for the one whose mailbox it gets. See
  /// VerdictRing::take_heard().
  std::exception_ptr settle_earlier(uint64_t number, const group::InterruptCheck& interrupt_check);
  Mailbox& take_mailbox(uint64_t number);
  /// The last, among the operations that the host has heard. Of the thread that hears them.
  const RefusedOperation& last_refused() const { return last_refused_; }
  void note_refused(RefusedOperation refused) { last_refused_ = std::move(refused); }
  /// An operation was found wrong that peers may hear of in the next one only: there the host hears
  /// rows at once, as does who refuses it, so that one call is enough.
  void force_eager_once() { is_eager_.store(true, std::memory_order_relaxed); }
  bool take_eager_once() { return is_eager_.exchange(false, std::memory_order_relaxed); }

  /// State that kernels of this buffer share, as it is now.
  kernels::Buffer buffer() const;
  /// Device memory in which kernels of one operation tell those behind them what they found; its
  /// counts, offsets and choices per expert belong to the plan.
  const kernels::Tables& tables() const { return tables_; }

  /// A launch of @p num_blocks in the stream of this buffer.
  /// @param usual_threads  of a block, where nothing else was asked for
  device::Launch launch(int num_blocks, int usual_threads = kUsualThreads) const;
  /// The same right behind another kernel of this buffer, before which the kernel may start: see
  /// device::Launch::is_dependent.
  device::Launch launch_behind(int num_blocks, int usual_threads = kUsualThreads) const;
  int num_sms() const { return num_sms_; }
  int num_local_experts() const { return buffer_.num_local_experts; }
  /// Threads of a block of a kernel that has @p usual_threads where nothing else was asked for.
  int num_threads(int usual_threads = kUsualThreads) const {
    return num_threads_ > 0 ? num_threads_ : usual_threads;
  }
  int tokens_per_chunk() const { return tokens_per_chunk_; }
  /// Way to ranks of other nodes; null with one node.
  const Internode* internode() const { return internode_.get(); }

  /// Launches the exchange of rows, within a node or across.
  void launch_exchange(const kernels::ExchangeParams& params) const;
  void launch_offers(const kernels::OffersParams& params) const;
  /// @param params  All but what belongs to the buffer.
  /// @param is_behind  right behind the kernel that moves rows
  void launch_receive(kernels::ReceiveParams params, bool is_behind = false) const;
  /// Returns whether rows at @p source cannot move by bulk copies.
  bool needs_plain_copies(const std::byte* source) const {
    return !device_->has_bulk_copies() || reinterpret_cast<uintptr_t>(source) % 16 != 0;
  }

  uint64_t take_ticket() { return ++last_ticket_; }
  /// For kernels that were not done at the first look, so far. Called as take_waited_ns() is.
  int64_t num_host_waits() const { return num_host_waits_; }
  void count_host_wait() { ++num_host_waits_; }
  /// Device copy of a value per rank, in the order of the stream; valid until the next call.
  /// @param mailbox  of the operation
  const uint8_t* upload_ranks(const Mailbox& mailbox, const std::vector<uint8_t>& values);
  const kernels::WaitReport& report() const {
    return *reinterpret_cast<const kernels::WaitReport*>(report_.get());
  }

  /// Returns whether operations are being recorded into a graph.
  bool is_capturing() const override;
  /// Keeps what a captured operation needs unchanged until the buffer is destroyed.
  void keep(std::shared_ptr<const void> owned) { kept_.push_back(std::move(owned)); }
  /// Memory that it needs until the next one.
  CapturedMemory& captured() { return captured_; }
  /// Takes device memory: zero where it is new.
  std::shared_ptr<std::byte> take_captured(int64_t kind, int64_t bytes) {
    return captured_.take<std::byte>(kind, bytes, [&] { return device_->allocate(bytes); });
  }
  /// An operation is being captured.
  void count_captured();
  size_t num_captured() const { return num_captured_; }
  /// Work put into the stream so far runs on with nobody waiting for it. @return its end.
  std::shared_ptr<Event> leave_running();
  /// Returns whether the runs of graphs that were put into streams have ended.
  bool have_graphs_ended() const {
    return !has_graphs() || is_host_caller() || baton_->is_complete();
  }
  /// Runs of graphs that are put into any stream from now on go behind what the stream holds.
  void go_before_graphs();
  /// Returns whether there are graphs, which may have advanced the epoch on the device beyond what
  /// the host knows. An operation then is in the stream, whole, when its call returns: else a run
  /// of a graph could come between its kernels, and nobody here hears of that.
  bool has_graphs() const override { return num_captured_ > 0; }

  /// Places in the heap for sets of so many tokens. They stay until all ranks have closed the
  /// buffer. @throws CapacityError
  kernels::TokenSets token_sets(int64_t num_tokens, int64_t num_topk);
  const kernels::TokenSets& reserved_sets() const { return sets_; }

  /// Device memory for counting choices, at least so many bytes, unset; kept between operations.
  std::byte* scratch(int64_t bytes);

  // Beside running kernels, for the slow path of waits.
  /// This rank's flags of @p epoch, as peers left them.
  bool has_row(uint64_t epoch, int peer_rank) const;
  bool is_done(uint64_t epoch, int peer_rank) const;
  /// Returns whether the operation that began last needs what @p peer_rank has not written, and
  /// cannot any more if it was gone before the call. @p site is then where it waits.
  bool lacks(int peer_rank, group::WaitSite* site) const;
  /// For peers that wait: this rank is obtaining memory, which takes its time.
  void show_phase(layout::Phase phase);
  /// In place of a peer that will write none.
  void write_rejected_row(uint64_t epoch, int peer_rank);

  /// Makes kernels find what was allocated since.
  void refresh_segments() { bases_->refresh(); }

  /// Waits until the stream is empty. @throws what a kernel threw.
  void synchronize();
  /// The same where nobody can be told: what kernels wait for comes, or they leave.
  void drain() noexcept;
  /// The same, and until the runs of graphs have ended, in whichever streams.
  void drain_graphs() noexcept;

 private:
  /// Announcement of a rank to the others when the buffer is made.
  struct Announcement {
    Offer offers[2];  ///< its control area, and memory that operations may use
    Device::Identity device;
    uint64_t needed_bytes;  ///< of low-latency windows, where they do not fit; else 0
    uint64_t available_bytes;
  };

  DeviceEndpoint(std::shared_ptr<group::Group> group,
                 std::shared_ptr<SymmetricMemory> memory,
                 std::shared_ptr<Device> device,
                 DeviceEndpointConfig config);
  void connect_areas(const group::InterruptCheck& interrupt_check);
  void find_peers(const std::vector<Announcement>& announced,
                  int64_t area_bytes,
                  const group::InterruptCheck& interrupt_check);
  /// Collective, where ranks are on several devices. @return what is wrong with them, or "".
  std::string ping_peers(std::byte* own_area,
                         int64_t area_bytes,
                         const group::InterruptCheck& interrupt_check);
  void compare_devices(const std::vector<Announcement>& announced);
  void connect_nodes(int64_t area_bytes, const group::InterruptCheck& interrupt_check);
  void make_tables();
  std::shared_ptr<Window> reserve_memory();
  void reserve_sets();
  uint64_t low_latency_bytes() const;
  std::shared_ptr<Window> take_reserved_window(uint64_t bytes, bool is_captured);
  std::shared_ptr<Window> allocate_window(uint64_t bytes);
  void reserve_windows(Announcement* own);
  void check_windows(const std::vector<Announcement>& announced) const;
  void upload_constants();
  Stream& side_stream() const;
  template <typename Word>
  Word read_word(const Word& word) const;
  template <typename Word>
  void write_word(Word& word, Word value);
  std::shared_ptr<ReceivePhase> receive_phase() const;
  void start_last_phase() override;
  void await_verdict(const group::InterruptCheck& interrupt_check) override;
  void end_device_operations() override;

  std::shared_ptr<SymmetricMemory> memory_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<Stream> stream_;
  /// True where the stream may be captured and has to be asked; else it is not captured.
  mutable std::atomic<bool> may_be_captured_;
  std::shared_ptr<Baton> baton_;                         ///< of operations beside graphs
  mutable std::shared_ptr<Stream> side_stream_;          ///< made when it is first needed
  mutable std::shared_ptr<Stream> caller_stream_;        ///< null until it is first needed
  std::vector<std::shared_ptr<Stream>> former_callers_;  ///< each once
  int num_sms_;
  int num_threads_;  ///< 0 where nothing was asked for
  int tokens_per_chunk_;
  InternodeConfig internode_config_;
  std::unique_ptr<Internode> internode_;

  layout::Workspace own_area_;         ///< in the memory of the device
  std::vector<std::byte*> areas_;      ///< [num_ranks] control areas in the memory of the device
  std::vector<uint8_t> is_elsewhere_;  ///< [num_ranks]: on another device than this rank
  bool spans_devices_ = false;
  std::shared_ptr<std::byte> remote_area_;  ///< stands for that of every rank of another node
  std::unique_ptr<SegmentBases> bases_;

  std::shared_ptr<std::byte> constants_;
  std::shared_ptr<std::byte> staging_;
  std::shared_ptr<std::byte> state_staging_;
  std::shared_ptr<std::byte> state_;
  kernels::Buffer buffer_;
  std::shared_ptr<std::byte> tables_memory_;
  kernels::Tables tables_;
  std::shared_ptr<std::byte> report_;
  std::shared_ptr<std::byte> waits_;  ///< kernels::WaitTotals [num_ranks]
  std::vector<int64_t> taken_waits_ns_;
  std::vector<Mailbox> mailboxes_;  ///< of operations in turn
  std::shared_ptr<std::byte> rank_values_;
  mutable std::mutex side_mutex_;
  std::shared_ptr<std::byte> side_word_;  ///< page-locked, under side_mutex_
  uint64_t last_ticket_ = 0;
  uint64_t last_number_ = 0;
  int64_t num_host_waits_ = 0;
  std::shared_ptr<const void> reserved_;  ///< for plans and tables of operations
  WindowRing windows_;                    ///< of low-latency rows
  kernels::TokenSets sets_;               ///< where balanced replicas take rows by rank
  std::shared_ptr<std::byte> scratch_;
  int64_t scratch_bytes_ = 0;
  mutable std::mutex phase_mutex_;
  std::shared_ptr<ReceivePhase> receive_phase_;  ///< under phase_mutex_; null for none
  VerdictRing<DeferredAgreement> verdicts_;
  RefusedOperation last_refused_;
  std::atomic<bool> is_eager_{false};
  CapturedMemory captured_;
  size_t num_captured_ = 0;                        ///< operations
  std::vector<std::shared_ptr<const void>> kept_;  ///< by captured operations
  std::unique_ptr<DeviceWatch> watch_;             ///< looks at the above
};

}  // namespace moe::runtime
