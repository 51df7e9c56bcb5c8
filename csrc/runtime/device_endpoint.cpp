#include "runtime/device_endpoint.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/sync.h"
#include "core/text.h"
#include "runtime/device_replicas.h"
#include "runtime/peer_ping.h"
#include "runtime/polling.h"

namespace moe::runtime {

namespace {

/// @throws std::runtime_error  what a rank said was wrong, on every rank.
void throw_first(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems)
    if (!problem.empty())
      throw std::runtime_error(problem);
}

std::shared_ptr<Device> activated(std::shared_ptr<Device> device) {
  device->activate();
  return device;
}

}  // namespace

/// Announcement of a rank to the others when the buffer is made.
struct DeviceEndpoint::Announcement {
  Offer offers[2];  ///< its control area, and memory that operations may use
  Device::Identity device;
  uint64_t needed_bytes = 0;  ///< bytes of low-latency windows, if they do not fit; else 0
  uint64_t available_bytes = 0;
};

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
      device_(activated(std::move(device))),
      internode_config_(std::move(config.internode)),
      segments_(std::make_unique<SegmentBases>(shared_group(), memory_, *device_)),
      control_(*this, *device_, *segments_, make_area()),
      operations_(*device_, num_ranks(), this->config().num_experts),
      watch_(*this, *device_, control_, operations_),
      order_(*this, *device_, watch_),
      launcher_(order_, control_, config.shape),
      buffer_memory_(*this, order_, *segments_) {}

DeviceEndpoint::~DeviceEndpoint() {
  destroy({});
}

const Window& DeviceEndpoint::make_area() {
  auto area = memory_->allocate(static_cast<uint64_t>(ControlMemory::area_bytes(*this)));
  const Window& made = *area;
  add_control_window(std::move(area));
  return made;
}

void DeviceEndpoint::connect_areas(const group::InterruptCheck& interrupt_check) {
  order_.stream()->fill(control_.area(), 0, ControlMemory::area_bytes(*this));
  // All memory that the first operations need, before any rank can have begun one: a call that asks
  // the driver for more may wait for every kernel on the device, and a kernel for this rank.
  Announcement own{{control_.area_offer(), {}}, device_->identity()};
  try {
    buffer_memory_.reserve_windows();
  } catch (const CapacityError& error) {
    own.needed_bytes = error.needed_bytes;
    own.available_bytes = error.available_bytes;
  }
  const auto reserved =
      buffer_memory_.reserve(control_.buffer(), launcher_.tokens_per_chunk(), &own.offers[1]);
  // Peers write to the area as soon as they know of it.
  order_.synchronize();
  const auto said =
      connect(0, std::string(reinterpret_cast<const char*>(&own), sizeof(own)), interrupt_check);
  std::vector<Announcement> announced(said.size());
  for (size_t i = 0; i < said.size(); ++i)
    std::memcpy(&announced[i], said[i].data(), std::min(said[i].size(), sizeof(Announcement)));
  auto is_elsewhere = compare_devices(announced);
  check_windows(announced);
  std::string problem;
  std::exception_ptr error;
  try {
    control_.connect(find_areas(announced, interrupt_check), std::move(is_elsewhere));
    segments_->refresh();
    control_.upload(*order_.stream());
    order_.synchronize();
  } catch (const std::exception& caught) {
    problem = concat("rank ", rank_idx(), " cannot make its buffer: ", caught.what());
    error = std::current_exception();
  }
  // Nobody begins an operation while another rank is still to ask for memory.
  const auto problems = group().all_gather(problem, interrupt_check);
  if (error)
    std::rethrow_exception(error);
  throw_first(problems);
  if (!spans_devices_)
    return;
  problem = ping_peers(group(), *device_, *order_.stream(), control_, interrupt_check);
  order_.stream()->fill(control_.area(), 0, ControlMemory::area_bytes(*this));
  order_.synchronize();
  throw_first(group().all_gather(problem, interrupt_check));
}

/// Ranks on another device than this one, [num_ranks]. Across nodes a row crosses once to each, and
/// is fanned out there.
std::vector<uint8_t> DeviceEndpoint::compare_devices(const std::vector<Announcement>& announced) {
  std::vector<uint8_t> is_elsewhere(announced.size());
  const bool has_nodes = group().nodes().num_nodes() > 1;
  for (int peer_rank = 0; peer_rank < num_ranks() && !has_nodes; ++peer_rank) {
    if (!group().is_active(peer_rank))
      continue;
    const Device::Identity& device = announced[static_cast<size_t>(peer_rank)].device;
    is_elsewhere[static_cast<size_t>(peer_rank)] = device != device_->identity() ? 1 : 0;
    spans_devices_ = spans_devices_ || is_elsewhere[static_cast<size_t>(peer_rank)] != 0;
  }
  return is_elsewhere;
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

/// Control areas of all ranks, [num_ranks].
std::vector<std::byte*> DeviceEndpoint::find_areas(const std::vector<Announcement>& announced,
                                                   const group::InterruptCheck& interrupt_check) {
  if (group().nodes().num_nodes() > 1)
    connect_nodes(interrupt_check);
  std::vector<std::byte*> areas(announced.size());
  group::WaitSite site;
  site.interrupt_check = &interrupt_check;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!group().is_active(peer_rank))
      continue;
    if (!group().is_local(peer_rank)) {
      areas[static_cast<size_t>(peer_rank)] = remote_area_.get();
      continue;
    }
    const auto& [area, reserved] = announced[static_cast<size_t>(peer_rank)].offers;
    areas[static_cast<size_t>(peer_rank)] = group().resolve(*memory_, peer_rank, area, site);
    group().resolve(*memory_, peer_rank, reserved, site);
  }
  return areas;
}

/// Ranks have the same configuration, so that what is thrown here is thrown on all of them.
void DeviceEndpoint::connect_nodes(const group::InterruptCheck& interrupt_check) {
  MOE_CHECK(internode_config_.regions != nullptr,
            "kernels of this backend reach ranks of one node; these ",
            num_ranks(),
            " ranks lie on ",
            group().nodes().num_nodes());
  remote_area_ = device_->allocate(ControlMemory::area_bytes(*this));
  auto internode = std::make_unique<Internode>(
      group(), *device_, internode_config_, config().num_experts, config().depth, interrupt_check);
  internode->upload(*order_.stream());
  launcher_.set_internode(std::move(internode));
}

void DeviceEndpoint::balance_replicas(std::shared_ptr<const layout::Replicas> replicas) {
  const auto active = device_->activate_for_now();
  if (replicas != nullptr)
    replicas =
        DeviceReplicas::make(*replicas,
                             config().num_experts,
                             *device_,
                             [this](std::byte* target, const std::byte* source, int64_t bytes) {
                               control_.copy(target, source, bytes);
                             });
  EndpointBase::balance_replicas(std::move(replicas));
}

void DeviceEndpoint::await_verdict(const group::InterruptCheck& interrupt_check) {
  const int64_t start_ns = sync::now_ns();
  // Their kernels end by the limits of kernels.
  for (Polling polling; !operations_.is_complete();) {
    const int64_t now_ns = sync::now_ns();
    operations_.look(now_ns);
    if (interrupt_check)
      interrupt_check();
    polling.rest(now_ns - start_ns);
  }
}

bool DeviceEndpoint::is_idle() const {
  if (!EndpointBase::is_idle())
    return false;
  open_receive_.start();  // a caller that asks wants the endpoint to become idle
  if (!EndpointBase::is_idle() || !order_.is_idle())
    return false;
  // Words of a rank count though recover() excludes it.
  operations_.hear();
  return true;
}

void DeviceEndpoint::restart(uint64_t next_epoch) {
  // Its kernels have ended. Who calls recover() knows that operations have failed.
  operations_.take_all({});
  operations_.note_refused({});
  watch_.pause([&] {
    EndpointBase::restart(next_epoch);
    control_.restart(*order_.stream(), next_epoch);
    order_.synchronize();
  });
}

group::Recoverable::Epochs DeviceEndpoint::epochs() const {
  return has_graphs() ? control_.epochs() : EndpointBase::epochs();
}

void DeviceEndpoint::end_device_operations() {
  order_.drain_graphs();
  watch_.stop();
  try {
    keep_untold_error(operations_.take_all({}));
  } catch (const ConcurrentUse&) {
    // A handler of a signal destroys the buffer: whom it has interrupted hears the end.
  }
  buffer_memory_.close();
  segments_ = nullptr;
  launcher_.set_internode(nullptr);
}

}  // namespace moe::runtime
