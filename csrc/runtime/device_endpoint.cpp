#include "runtime/device_endpoint.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/sync.h"
#include "core/text.h"
#include "layout/rank_sums.h"
#include "layout/token_sets.h"
#include "layout/window.h"
#include "ops/dispatch_rules.h"
#include "ops/operations_in_flight.h"
#include "runtime/deferred_agreement.h"
#include "runtime/device_plan.h"
#include "runtime/device_replicas.h"
#include "runtime/dispatch_launches.h"
#include "runtime/polling.h"
#include "runtime/receive_phase.h"

namespace moe::runtime {

namespace {

using kernels::Buffer;
using kernels::BufferState;
using kernels::WaitReport;
using layout::Row;
using layout::Workspace;

// Sizes that are made room for where the configuration leaves them open.
constexpr int64_t kUsualTokens = 4096;
constexpr int64_t kUsualTopk = 8;
constexpr int64_t kPlansAtOnce = 2;  ///< for each operation in flight: handles live longer
constexpr int64_t kHostBytesAtOnce = 64 << 10;
constexpr int64_t kPageBytes = 4096;  ///< to which memory is rounded up

/// See ops::DeferredJoin.
class StreamJoin : public ops::DeferredJoin {
 public:
  StreamJoin(std::shared_ptr<Stream> caller, std::shared_ptr<Event> end)
      : caller_(std::move(caller)), end_(std::move(end)) {}
  ~StreamJoin() override {
    try {
      join({});
    } catch (...) {
      // The device has failed: nothing runs on it any more.
    }
  }

  void join(const group::InterruptCheck&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!end_)
      return;
    // A graph that is being recorded cannot wait for what is outside of it.
    if (caller_->is_capturing())
      await(*end_);
    else
      caller_->wait(*end_);
    end_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Stream> caller_;
  std::shared_ptr<Event> end_;  ///< null once joined
};

/// Mark of the caller's stream as an operation of the progress thread was called.
struct CallerMark {
  std::shared_ptr<Event> end;
  std::shared_ptr<DeferredAgreement> verdict;  ///< of another buffer's operation before it, or null
};

/// @throws std::runtime_error  what a rank said was wrong, on every rank.
void throw_first(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems)
    if (!problem.empty())
      throw std::runtime_error(problem);
}

std::shared_ptr<Stream> make_stream(Device& device) {
  device.activate();
  return device.create_stream();
}

}  // namespace

std::shared_ptr<DeviceEndpoint> DeviceEndpoint::create(
    std::shared_ptr<group::Group> group,
    std::shared_ptr<SymmetricMemory> memory,
    std::shared_ptr<Device> device,
    DeviceEndpointConfig config,
    const group::InterruptCheck& interrupt_check) {
  const auto endpoint = ops::share_buffer(new DeviceEndpoint(
      std::move(group), std::move(memory), std::move(device), std::move(config)));
  try {
    endpoint->connect_areas(interrupt_check);
  } catch (const InvalidArgument&) {
    throw;  // on every rank alike: nobody has a buffer that could write here
  } catch (...) {
    endpoint->give_up_connecting();
    throw;
  }
  endpoint->group().add_recoverable(endpoint->buffer_number(), endpoint);
  return endpoint;
}

DeviceEndpoint::DeviceEndpoint(std::shared_ptr<group::Group> group,
                               std::shared_ptr<SymmetricMemory> memory,
                               std::shared_ptr<Device> device,
                               DeviceEndpointConfig config)
    : EndpointBase(std::move(group), std::move(config.common)),
      memory_(std::move(memory)),
      device_(std::move(device)),
      stream_(make_stream(*device_)),
      may_be_captured_(device_->has_host_caller()),
      num_sms_(config.shape.num_sms > 0 ? config.shape.num_sms : device_->num_sms()),
      num_threads_(config.shape.num_threads),
      tokens_per_chunk_(config.shape.tokens_per_chunk > 0 ? config.shape.tokens_per_chunk
                                                          : kDefaultTokensPerChunk),
      internode_config_(std::move(config.internode)),
      areas_(static_cast<size_t>(this->group().num_ranks())),
      is_elsewhere_(areas_.size()),
      captured_(stream_) {
  baton_ = device_->create_baton();
  watch_ = std::make_unique<DeviceWatch>(*this);
}

DeviceEndpoint::~DeviceEndpoint() {
  destroy({});
}

void DeviceEndpoint::connect_areas(const group::InterruptCheck& interrupt_check) {
  const int64_t bytes = Workspace::bytes(num_ranks(), config().num_experts, config().depth);
  const auto own_area = memory_->allocate(static_cast<uint64_t>(bytes));
  add_control_window(own_area);
  own_area_ = Workspace(own_area->data(), num_ranks(), config().num_experts, config().depth);
  stream_->fill(own_area->data(), 0, bytes);
  // All memory that the first operations need, before any rank can have begun one: a call that asks
  // the driver for more may wait for every kernel on the device, and a kernel for this rank.
  make_tables();
  bases_ = std::make_unique<SegmentBases>(shared_group(), memory_, *device_);
  Announcement own{{own_area->offer(), {}}, device_->identity(), 0, 0};
  reserve_windows(&own);
  reserve_sets();
  const auto reserved = reserve_memory();
  // Segments are opened in their order.
  own.offers[1] = reserved->offer();
  for (const Offer& other : {windows_.last_offer(), sets_.offer})
    if (other.segment_idx > own.offers[1].segment_idx)
      own.offers[1] = other;
  // Peers write to the area as soon as they know of it.
  synchronize();
  const auto said =
      connect(0, std::string(reinterpret_cast<const char*>(&own), sizeof(own)), interrupt_check);
  std::vector<Announcement> announced(said.size());
  for (size_t i = 0; i < said.size(); ++i)
    std::memcpy(&announced[i], said[i].data(), std::min(said[i].size(), sizeof(Announcement)));
  compare_devices(announced);
  check_windows(announced);
  std::string problem;
  std::exception_ptr error;
  try {
    find_peers(announced, bytes, interrupt_check);
  } catch (const std::exception& caught) {
    problem = concat("rank ", rank_idx(), " cannot make its buffer: ", caught.what());
    error = std::current_exception();
  }
  // Nobody begins an operation while another rank is still to ask for memory.
  const auto problems = group().all_gather(problem, interrupt_check);
  if (error)
    std::rethrow_exception(error);
  throw_first(problems);
  if (spans_devices_)
    throw_first(
        group().all_gather(ping_peers(own_area->data(), bytes, interrupt_check), interrupt_check));
}

/// Across nodes a row crosses once to each, and is fanned out there.
void DeviceEndpoint::compare_devices(const std::vector<Announcement>& announced) {
  const bool has_nodes = group().nodes().num_nodes() > 1;
  for (int peer_rank = 0; peer_rank < num_ranks() && !has_nodes; ++peer_rank) {
    if (!group().is_active(peer_rank))
      continue;
    const Device::Identity& device = announced[static_cast<size_t>(peer_rank)].device;
    is_elsewhere_[static_cast<size_t>(peer_rank)] = device != device_->identity() ? 1 : 0;
    spans_devices_ = spans_devices_ || is_elsewhere_[static_cast<size_t>(peer_rank)] != 0;
  }
}

void DeviceEndpoint::find_peers(const std::vector<Announcement>& announced,
                                int64_t area_bytes,
                                const group::InterruptCheck& interrupt_check) {
  if (group().nodes().num_nodes() > 1)
    connect_nodes(area_bytes, interrupt_check);
  group::WaitSite site;
  site.interrupt_check = &interrupt_check;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!group().is_active(peer_rank))
      continue;
    if (!group().is_local(peer_rank)) {
      areas_[static_cast<size_t>(peer_rank)] = remote_area_.get();
      continue;
    }
    const auto& [area, reserved] = announced[static_cast<size_t>(peer_rank)].offers;
    areas_[static_cast<size_t>(peer_rank)] = group().resolve(*memory_, peer_rank, area, site);
    group().resolve(*memory_, peer_rank, reserved, site);
  }
  bases_->refresh();
  upload_constants();
  synchronize();
}

/// The first dispatch that needs them says so where the heap is short.
void DeviceEndpoint::reserve_sets() {
  if (!config().balances_replicas)
    return;
  try {
    token_sets(config().num_max_tokens > 0 ? config().num_max_tokens : kUsualTokens,
               config().num_max_topk > 0 ? config().num_max_topk : kUsualTopk);
  } catch (const CapacityError&) {
  }
}

kernels::TokenSets DeviceEndpoint::token_sets(int64_t num_tokens, int64_t num_topk) {
  // Whatever placement comes.
  const int64_t stride = layout::most_set_bytes(
      num_ranks(), layout::most_shared_experts(config().num_experts), num_tokens, num_topk);
  if (stride <= sets_.stride && sets_.base != nullptr)
    return sets_;
  kernels::TokenSets sets;
  sets.stride = std::max({stride, 2 * sets_.stride, int64_t{64}});
  sets.num_nodes = group().nodes().num_nodes();
  const auto window = allocate_window(static_cast<uint64_t>(
      sets.stride * kernels::TokenSets::num_places(config().depth, sets.num_nodes)));
  add_control_window(window);
  sets.base = window->data();
  sets.offer = window->offer();
  return sets_ = sets;
}

/// Memory of the sizes that the configuration speaks of, for the plans, tables and scratch of
/// operations and for windows.
/// @return A window that holds those for windows, for peers to open before it is given back.
std::shared_ptr<Window> DeviceEndpoint::reserve_memory() {
  const int64_t num_tokens = config().num_max_tokens > 0 ? config().num_max_tokens : kUsualTokens;
  const int64_t num_topk = config().num_max_topk > 0 ? config().num_max_topk : kUsualTopk;
  // Low-latency dispatches, each with its combine, of which the host runs ahead.
  const int64_t num_pairs = windows_.bytes() > 0 ? ops::kMostUnheard / 2 : 0;
  const int64_t plan_bytes =
      DevicePlan::memory_bytes(*this, layout::RowLayout::kExpertMajor, num_tokens, num_topk) +
      DispatchTables::memory_bytes(*this, nullptr) + 2 * kPageBytes;
  scratch(DispatchLaunches::scratch_bytes(*this, num_tokens, num_topk));
  const int64_t num_plans = kPlansAtOnce * std::max<int64_t>(config().depth, num_pairs);
  // Those of two placements, while one replaces the other.
  const int64_t replica_bytes =
      config().balances_replicas
          ? 2 * DeviceReplicas::memory_bytes(num_ranks(), config().num_experts)
          : 0;
  reserved_ =
      device_->reserve(num_plans * plan_bytes + replica_bytes, kHostBytesAtOnce + replica_bytes);
  // The device is the host where the caller is, and growth of its heap waits for nobody.
  if (is_host_caller() || config().max_row_bytes == 0 || config().num_max_tokens == 0)
    return memory_->allocate(0);
  const int64_t num_rows = num_tokens * std::max(num_topk + 1, num_pairs);
  int64_t bytes = num_rows * config().max_row_bytes;
  // A combine then has a row more for each that came.
  if (config().rank_reduction)
    bytes = 2 * bytes + layout::RankSumsMap::make(num_tokens, num_topk, sizeof(double)).sums_offset;
  try {
    return memory_->allocate(static_cast<uint64_t>(bytes));
  } catch (const CapacityError&) {  // where it is short, operations say so
    return memory_->allocate(0);
  }
}

/// Bytes of the largest low-latency window, or sums of its combine, that are configured; 0
/// where it leaves a size open.
uint64_t DeviceEndpoint::low_latency_bytes() const {
  const int64_t num_rows = ops::num_low_latency_rows(*this);
  int64_t row_bytes = config().max_row_bytes;
  if (num_rows == 0 || row_bytes == 0)
    return 0;
  // Rows of two bytes an element are no smaller than quantized ones with their scale factors.
  const int bits = config().row_type & 0xFF;
  if (config().hidden > 0 && bits >= 16)
    row_bytes = config().hidden * bits / 8;
  const int64_t weight_bytes = bits == 64 || bits == 0 ? 8 : 4;
  int64_t bytes =
      layout::ReceiveWindow::make(
          layout::RowLayout::kLowLatency, num_rows, row_bytes, {}, weight_bytes, 0, false, true)
          .bytes;
  if (config().rank_reduction && config().num_max_topk > 0)
    bytes = std::max(
        bytes,
        layout::RankSumsMap::make(config().num_max_tokens, config().num_max_topk, sizeof(double))
            .bytes(num_rows, row_bytes));
  return static_cast<uint64_t>(bytes + kPageBytes);  // regions of scale factors are aligned
}

void DeviceEndpoint::reserve_windows(Announcement* own) {
  try {
    windows_ = WindowRing(*memory_, config().num_low_latency_windows, low_latency_bytes());
  } catch (const CapacityError& error) {
    own->needed_bytes = error.needed_bytes;
    own->available_bytes = error.available_bytes;
  }
}

/// Every rank finds the same.
void DeviceEndpoint::check_windows(const std::vector<Announcement>& announced) const {
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const Announcement& said = announced[static_cast<size_t>(peer_rank)];
    if (!group().is_active(peer_rank) || said.needed_bytes == 0)
      continue;
    CapacityError error(concat("rank ",
                               peer_rank,
                               " needs ",
                               said.needed_bytes,
                               " bytes for ",
                               config().num_low_latency_windows,
                               " low-latency windows of this buffer (num_low_latency_windows), ",
                               said.available_bytes,
                               " can be had"),
                        said.needed_bytes,
                        said.available_bytes);
    error.ranks.push_back(peer_rank);
    throw error;
  }
}

/// Kernels are behind the caller's stream, and other streams may use what was dropped, too. Those
/// that called this buffer are waited for as well; others may hold operations of other buffers, in
/// which peers may wait for this one.
std::shared_ptr<Window> DeviceEndpoint::take_reserved_window(uint64_t bytes, bool is_captured) {
  std::vector<std::shared_ptr<Stream>> busy;
  for (auto& stream : device_->caller_streams())
    if (stream != caller_stream_ && !stream->is_idle())
      busy.push_back(std::move(stream));
  const bool can_wait =
      busy.empty() || (!is_captured && std::ranges::all_of(busy, [this](const auto& stream) {
        return !stream->is_capturing() && std::ranges::count(former_callers_, stream) > 0;
      }));
  auto window = can_wait ? windows_.take(bytes) : nullptr;
  for (const auto& stream : busy)
    if (window != nullptr)
      stream_->wait(*stream->record());
  return window;
}

std::shared_ptr<Window> DeviceEndpoint::take_window(uint64_t bytes, bool is_captured) {
  if (!is_captured)
    return take_reserved_window(bytes, false);
  // One size, whatever the rows are. The buffer's own go to graphs for good: an eager result
  // that a replay wrote to would tell nobody.
  const uint64_t size = std::max(bytes, windows_.bytes());
  return captured_.take<Window>(kCapturedRows, static_cast<int64_t>(size), [&] {
    auto window = take_reserved_window(size, true);
    return window != nullptr ? window : allocate_window(size);
  });
}

std::shared_ptr<Window> DeviceEndpoint::take_captured_window(int64_t kind, uint64_t bytes) {
  return captured_.take<Window>(
      kind, static_cast<int64_t>(bytes), [&] { return allocate_window(bytes); });
}

std::shared_ptr<Window> DeviceEndpoint::allocate_window(uint64_t bytes) {
  auto window = memory_->allocate(bytes);
  refresh_segments();
  return window;
}

/// Ranks have the same configuration, so that what is thrown here is thrown on all of them.
void DeviceEndpoint::connect_nodes(int64_t area_bytes,
                                   const group::InterruptCheck& interrupt_check) {
  MOE_CHECK(internode_config_.regions != nullptr,
            "kernels of this backend reach ranks of one node; these ",
            num_ranks(),
            " ranks lie on ",
            group().nodes().num_nodes());
  remote_area_ = device_->allocate(area_bytes);
  internode_ = std::make_unique<Internode>(
      group(), *device_, internode_config_, config().num_experts, config().depth, interrupt_check);
  internode_->upload(*stream_);
}

void DeviceEndpoint::make_tables() {
  const int64_t count = num_ranks();
  const int num_experts = config().num_experts;
  const auto lay = [&](Suballocator suballocator) {
    buffer_.workspaces = suballocator.take<std::byte*>(count);
    buffer_.is_active = suballocator.take<uint8_t>(count);
    buffer_.is_elsewhere = suballocator.take<uint8_t>(count);
    buffer_.expert_rank = suballocator.take<int32_t>(num_experts);
    buffer_.experts_by_rank = suballocator.take<int32_t>(num_experts);
    buffer_.first_of_rank = suballocator.take<int32_t>(count + 1);
    return suballocator.bytes();
  };
  constants_ = device_->allocate(lay(Suballocator(nullptr)));
  lay(Suballocator(constants_.get()));
  state_ = device_->allocate(sizeof(BufferState));
  report_ = device_->allocate_host(sizeof(WaitReport));
  waits_ = device_->allocate_host(count * static_cast<int64_t>(sizeof(kernels::WaitTotals)));
  taken_waits_ns_.resize(static_cast<size_t>(count));
  for (uint64_t i = 0; i < (is_host_caller() ? 1 : ops::kMostUnheard); ++i)
    mailboxes_.emplace_back(*device_, num_ranks(), num_experts);
  rank_values_ = device_->allocate(count);
  side_word_ = device_->allocate_host(8);
  // Page-locked memory that outlives its copies: who uploads drains the stream.
  staging_ = device_->allocate_host(16 * (count + 1) + 8 * num_experts + 64 * 6);
  state_staging_ = device_->allocate_host(sizeof(BufferState));

  buffer_.rank_idx = rank_idx();
  buffer_.num_ranks = num_ranks();
  buffer_.num_experts = num_experts;
  buffer_.num_local_experts =
      static_cast<int32_t>(placement().local_experts[static_cast<size_t>(rank_idx())].size());
  buffer_.depth = config().depth;
  buffer_.state = reinterpret_cast<BufferState*>(state_.get());
  buffer_.report = reinterpret_cast<WaitReport*>(report_.get());
  buffer_.waits = reinterpret_cast<kernels::WaitTotals*>(waits_.get());
  buffer_.abort_word = reinterpret_cast<const uint32_t*>(
      device_->map_host(group().abort_word(), sizeof(uint32_t), group().abort_memory()));
  buffer_.stall_limit_ns = static_cast<uint64_t>(group().stall_timeout_ns());
  buffer_.arrival_limit_ns = static_cast<uint64_t>(group().arrival_timeout_ns());

  const auto lay_tables = [&](Suballocator suballocator) {
    tables_.epoch = suballocator.take<uint64_t>(1);
    tables_.may_move = suballocator.take<int32_t>(1);
    tables_.peers = suballocator.take<kernels::Peer>(2 * count);
    tables_.stream_starts = suballocator.take<int64_t>(num_experts + count);
    tables_.num_rows = suballocator.take<int64_t>(2);
    tables_.status = suballocator.take<int32_t>(2);
    return suballocator.bytes();
  };
  tables_memory_ = device_->allocate(lay_tables(Suballocator(nullptr)));
  lay_tables(Suballocator(tables_memory_.get()));
}

void DeviceEndpoint::upload_constants() {
  const int64_t count = num_ranks();
  const int64_t num_experts = config().num_experts;
  Suballocator suballocator(staging_.get());
  auto* const bases = suballocator.take<std::byte*>(count);
  auto* const is_active = suballocator.take<uint8_t>(count);
  auto* const is_elsewhere = suballocator.take<uint8_t>(count);
  auto* const expert_rank = suballocator.take<int32_t>(num_experts);
  auto* const experts_by_rank = suballocator.take<int32_t>(num_experts);
  auto* const first_of_rank = suballocator.take<int32_t>(count + 1);
  int32_t num_listed = 0;
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    bases[rank_idx] = areas_[static_cast<size_t>(rank_idx)];
    is_active[rank_idx] = group().is_active(rank_idx) ? 1 : 0;
    first_of_rank[rank_idx] = num_listed;
    for (const int32_t expert_idx : placement().local_experts[static_cast<size_t>(rank_idx)])
      experts_by_rank[num_listed++] = expert_idx;
  }
  first_of_rank[count] = num_listed;
  std::copy(placement().expert_rank.begin(), placement().expert_rank.end(), expert_rank);
  std::copy(is_elsewhere_.begin(), is_elsewhere_.end(), is_elsewhere);
  const auto upload = [this](const void* target, const void* source, int64_t bytes) {
    stream_->copy(const_cast<void*>(target), source, bytes);
  };
  upload(buffer_.workspaces, bases, 8 * count);
  upload(buffer_.is_active, is_active, count);
  upload(buffer_.is_elsewhere, is_elsewhere, count);
  upload(buffer_.expert_rank, expert_rank, 4 * num_experts);
  upload(buffer_.experts_by_rank, experts_by_rank, 4 * num_experts);
  upload(buffer_.first_of_rank, first_of_rank, 4 * (count + 1));
}

void DeviceEndpoint::balance_replicas(std::shared_ptr<const layout::Replicas> replicas) {
  const auto active = device_->activate_for_now();
  if (replicas != nullptr)
    replicas =
        DeviceReplicas::make(*replicas,
                             config().num_experts,
                             *device_,
                             [this](std::byte* target, const std::byte* source, int64_t bytes) {
                               const std::lock_guard<std::mutex> lock(side_mutex_);
                               side_stream().copy(target, source, bytes);
                               await(*side_stream().record());
                             });
  EndpointBase::balance_replicas(std::move(replicas));
}

kernels::Buffer DeviceEndpoint::buffer() const {
  Buffer buffer = buffer_;
  buffer.abort_generation = group().generation();
  buffer.first_epoch = first_epoch();
  buffer.segment_bases = bases_->table();
  buffer.found_bases = bases_->found();
  return buffer;
}

device::Launch DeviceEndpoint::launch(int num_blocks, int usual_threads) const {
  device::Launch launch;
  launch.num_blocks = num_blocks;
  launch.num_threads = num_threads(usual_threads);
  launch.stream = stream_->handle();
  return launch;
}

device::Launch DeviceEndpoint::launch_behind(int num_blocks, int usual_threads) const {
  device::Launch behind = launch(num_blocks, usual_threads);
  behind.is_dependent = device_->has_bulk_copies();
  return behind;
}

void DeviceEndpoint::launch_exchange(const kernels::ExchangeParams& params) const {
  // Blocks take chunks in turn: more of them than run at a time only cost.
  const device::Launch shape = launch(kBlocksPerSm * device_->num_sms());
  if (internode_ == nullptr)
    kernels::launch_exchange(shape, params);
  else
    internode_->kernels().exchange(shape, params, internode_->rails());
}

void DeviceEndpoint::launch_offers(const kernels::OffersParams& params) const {
  if (internode_ == nullptr)
    kernels::launch_offers(launch(1), params);
  else
    internode_->kernels().offers(launch(1), params, internode_->rails());
}

void DeviceEndpoint::launch_receive(kernels::ReceiveParams params, bool is_behind) const {
  params.buffer = buffer();
  device::Launch shape = is_behind ? launch_behind(num_sms_) : launch(num_sms_);
  fit_shared_memory(*device_, shape, [&](int num_threads) {
    return kernels::receive_shared_bytes(params, num_threads);
  });
  kernels::launch_receive(shape, params);
}

void DeviceEndpoint::set_caller_stream(uintptr_t handle,
                                       const group::InterruptCheck& interrupt_check) {
  std::shared_ptr<Stream> stream = device_->caller_stream(handle);
  if (stream == caller_stream_)
    return;
  progress().wait_idle(interrupt_check);
  if (std::ranges::count(former_callers_, stream) == 0)
    former_callers_.push_back(stream);
  caller_stream_ = std::move(stream);
}

/// Asked for once it is needed: memory that is given back waits for every stream that was.
const std::shared_ptr<Stream>& DeviceEndpoint::shared_caller_stream() const {
  if (caller_stream_ == nullptr)
    caller_stream_ = device_->caller_stream(0);
  return caller_stream_;
}

std::shared_ptr<const void> DeviceEndpoint::mark_caller() {
  if (is_host_caller())
    return nullptr;
  return std::make_shared<CallerMark>(
      CallerMark{caller_stream().record(), DeferredAgreement::of_another(*this)});
}

void DeviceEndpoint::wait_for_caller(const void* mark) {
  if (is_host_caller())
    return;
  if (mark != nullptr) {
    const auto& [end, verdict] = *static_cast<const CallerMark*>(mark);
    if (verdict != nullptr)
      verdict->hear_for(*this, {});
    stream_->wait(*end);
  } else {
    stream_->wait(*caller_stream().record_uncaptured());
  }
  if (has_graphs())
    stream_->take(*baton_);
}

/// Its own stream is captured behind the caller's only; a capture of another stream that the caller
/// has left meanwhile may be open.
bool DeviceEndpoint::is_capturing() const {
  if (caller_stream().is_capturing())
    return true;
  if (!may_be_captured_.load(std::memory_order_relaxed))
    return false;
  const bool is_captured = stream_->is_capturing();
  if (!is_captured && !is_host_caller())
    may_be_captured_.store(false, std::memory_order_relaxed);
  return is_captured;
}

/// Graphs run in the stream where the caller is the host.
void DeviceEndpoint::enter_capture() {
  if (is_host_caller())
    return;
  may_be_captured_.store(true, std::memory_order_relaxed);
  const bool is_first = !stream_->is_capturing();
  if (is_first && !has_graphs())
    stream_->give(*baton_);
  stream_->wait(*caller_stream().record());
  if (is_first)
    stream_->take(*baton_);
}

void DeviceEndpoint::leave_capture(Stream& caller) {
  if (is_host_caller() || !stream_->is_capturing())
    return;
  stream_->give(*baton_);
  caller.wait(*stream_->record());
}

void DeviceEndpoint::go_before_graphs() {
  if (has_graphs() && !is_host_caller())
    stream_->give(*baton_);
}

void DeviceEndpoint::make_caller_wait(const Event& end) {
  caller_stream().wait(end);
}

std::shared_ptr<ops::DeferredJoin> DeviceEndpoint::join_caller(std::shared_ptr<Stream> caller,
                                                               std::shared_ptr<Event> end) {
  return std::make_shared<StreamJoin>(std::move(caller), std::move(end));
}

std::shared_ptr<Event> DeviceEndpoint::leave_running() {
  auto end = stream_->record_uncaptured();
  go_before_graphs();
  watch_->follow(end);
  return end;
}

void DeviceEndpoint::leave_to_receive(std::shared_ptr<ReceivePhase> phase) {
  const std::lock_guard<std::mutex> lock(phase_mutex_);
  receive_phase_ = std::move(phase);
}

std::shared_ptr<ReceivePhase> DeviceEndpoint::receive_phase() const {
  const std::lock_guard<std::mutex> lock(phase_mutex_);
  return receive_phase_;
}

void DeviceEndpoint::settle_receive(const group::InterruptCheck& interrupt_check) {
  const std::shared_ptr<ReceivePhase> phase = receive_phase();
  if (phase == nullptr)
    return;
  phase->settle(interrupt_check);
  leave_to_receive(nullptr);
}

/// All before it where the memory of this one may be none but theirs: without windows for
/// low-latency rows all is of the heap, and behind graphs or across nodes what follows needs to
/// know what came before.
std::exception_ptr DeviceEndpoint::settle_earlier(uint64_t number,
                                                  const group::InterruptCheck& interrupt_check) {
  const bool runs_ahead = windows_.bytes() > 0 && !has_graphs() && internode_ == nullptr;
  const uint64_t num_in_flight = runs_ahead ? mailboxes_.size() : 1;
  return verdicts_.take_heard(number - std::min(number, num_in_flight), interrupt_check);
}

Mailbox& DeviceEndpoint::take_mailbox(uint64_t number) {
  Mailbox& mailbox = mailboxes_[number % mailboxes_.size()];
  mailbox.reset();
  return mailbox;
}

void DeviceEndpoint::start_last_phase() {
  if (const auto phase = receive_phase())
    phase->start();
}

void DeviceEndpoint::await_verdict(const group::InterruptCheck& interrupt_check) {
  const int64_t start_ns = sync::now_ns();
  // Their kernels end by the limits of kernels.
  for (Polling polling; !verdicts_.is_complete();) {
    const int64_t now_ns = sync::now_ns();
    verdicts_.look(now_ns);
    if (interrupt_check)
      interrupt_check();
    polling.rest(now_ns - start_ns);
  }
}

std::byte* DeviceEndpoint::scratch(int64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
    scratch_ = device_->allocate_unset(scratch_bytes_);
  }
  return scratch_.get();
}

Stream& DeviceEndpoint::side_stream() const {
  if (!side_stream_) {
    device_->activate();
    side_stream_ = device_->side_stream();
  }
  return *side_stream_;
}

template <typename Word>
Word DeviceEndpoint::read_word(const Word& word) const {
  const std::lock_guard<std::mutex> lock(side_mutex_);
  side_stream().copy(side_word_.get(), &word, sizeof(Word));
  await(*side_stream().record());
  return *reinterpret_cast<const Word*>(side_word_.get());
}

template <typename Word>
void DeviceEndpoint::write_word(Word& word, Word value) {
  const std::lock_guard<std::mutex> lock(side_mutex_);
  *reinterpret_cast<Word*>(side_word_.get()) = value;
  side_stream().copy(&word, side_word_.get(), sizeof(Word));
  await(*side_stream().record());
}

bool DeviceEndpoint::has_row(uint64_t epoch, int peer_rank) const {
  return read_word(own_area_.row(epoch, peer_rank).epoch) >= epoch;
}

bool DeviceEndpoint::is_done(uint64_t epoch, int peer_rank) const {
  return read_word(own_area_.done(epoch, peer_rank).epoch) >= epoch;
}

bool DeviceEndpoint::lacks(int peer_rank, group::WaitSite* site) const {
  const auto& state = *reinterpret_cast<const BufferState*>(state_.get());
  const uint64_t epoch = read_word(state.epoch);
  if (epoch < first_epoch())
    return false;
  const bool has_come = has_row(epoch, peer_rank);
  // A rank that rejected an operation writes nothing else in it.
  const Row& row = own_area_.row(epoch, peer_rank);
  if (has_come && (read_word(row.status) != static_cast<int32_t>(layout::RowStatus::kOk) ||
                   is_done(epoch, peer_rank)))
    return false;
  site->operation = static_cast<layout::Operation>(
      read_word(own_area_.row(epoch, rank_idx()).arguments.operation));
  site->phase = has_come ? layout::Phase::kData : layout::Phase::kRows;
  site->epoch = static_cast<int64_t>(epoch);
  site->buffer_number = buffer_number();
  return true;
}

ops::WaitStatistics DeviceEndpoint::wait_statistics() const {
  ops::WaitStatistics statistics;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const kernels::WaitTotals& totals = buffer_.waits[peer_rank];
    statistics.waited_ns.push_back(static_cast<int64_t>(sync::load_relaxed(totals.waited_ns)));
    statistics.num_waits.push_back(static_cast<int64_t>(sync::load_relaxed(totals.num_waits)));
  }
  return statistics;
}

std::vector<int64_t> DeviceEndpoint::take_waited_ns() {
  std::vector<int64_t> waited_ns = wait_statistics().waited_ns;
  for (size_t i = 0; i < waited_ns.size(); ++i)
    waited_ns[i] -= std::exchange(taken_waits_ns_[i], waited_ns[i]);
  return waited_ns;
}

void DeviceEndpoint::show_phase(layout::Phase phase) {
  write_word(own_area_.activity().phase, static_cast<int32_t>(phase));
}

void DeviceEndpoint::write_rejected_row(uint64_t epoch, int peer_rank) {
  Row& row = own_area_.row(epoch, peer_rank);
  write_word(row.status, static_cast<int32_t>(layout::RowStatus::kInvalidArgument));
  write_word(row.epoch, epoch);
  // An operation further on may wait for its ring entry.
  write_word(own_area_.done(epoch, peer_rank).epoch, epoch);
}

const uint8_t* DeviceEndpoint::upload_ranks(const Mailbox& mailbox,
                                            const std::vector<uint8_t>& values) {
  stream_->copy(
      rank_values_.get(), mailbox.write_ranks(values), static_cast<int64_t>(values.size()));
  return reinterpret_cast<const uint8_t*>(rank_values_.get());
}

void DeviceEndpoint::synchronize() {
  await(*stream_->record());
}

void DeviceEndpoint::drain() noexcept {
  try {
    synchronize();
  } catch (...) {
    // A kernel failed in itself, and nothing behind it runs: the calls that waited for it have
    // raised.
  }
}

void DeviceEndpoint::drain_graphs() noexcept {
  try {
    if (has_graphs() && !is_host_caller())
      stream_->take(*baton_);
  } catch (...) {
    // A kernel failed, as in drain().
  }
  drain();
}

bool DeviceEndpoint::is_idle() const {
  if (!EndpointBase::is_idle())
    return false;
  // A caller that asks wants the endpoint to become idle.
  if (const auto phase = receive_phase())
    phase->start();
  if (!EndpointBase::is_idle() || !stream_->is_idle() || !have_graphs_ended())
    return false;
  // Words of a rank count though recover() excludes it.
  verdicts_.hear();
  return true;
}

void DeviceEndpoint::restart(uint64_t next_epoch) {
  // Its kernels have ended. Who calls recover() knows that operations have failed.
  verdicts_.take_all({});
  last_refused_ = {};
  watch_->pause([&] {
    EndpointBase::restart(next_epoch);
    std::memset(report_.get(), 0, sizeof(WaitReport));
    upload_constants();
    reinterpret_cast<BufferState*>(state_staging_.get())->epoch = next_epoch - 1;
    stream_->copy(state_.get(), state_staging_.get(), sizeof(BufferState));
    await(*stream_->record());
  });
}

void DeviceEndpoint::count_captured() {
  ++num_captured_;
  watch_->follow_always();
}

group::Recoverable::Epochs DeviceEndpoint::epochs() const {
  if (!has_graphs())
    return EndpointBase::epochs();
  const auto& state = *reinterpret_cast<const BufferState*>(state_.get());
  const uint64_t epoch = read_word(state.epoch);
  // The operation that left last has not completed.
  return {epoch + 1, read_word(state.has_left) == 0 ? epoch : epoch - 1};
}

void DeviceEndpoint::end_device_operations() {
  drain_graphs();
  watch_->stop();
  try {
    keep_untold_error(verdicts_.take_all({}));
  } catch (const ConcurrentUse&) {
    // A handler of a signal destroys the buffer: whom it has interrupted hears the end.
  }
  kept_.clear();
  captured_.close();
  windows_.clear();
  bases_ = nullptr;
  internode_ = nullptr;
}

}  // namespace moe::runtime
