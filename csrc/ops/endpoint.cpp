#include "ops/endpoint.h"

#include <mutex>

#include "cpu/this_machine.h"
#include "group/socket_rail.h"
#include "ops/kept_memory.h"

namespace moe::ops {

namespace {

const cpu::RowKernels& choose_kernels(const std::string& isa) {
  if (isa.empty())
    return cpu::best_row_kernels();
  const cpu::RowKernels* kernels = cpu::find_row_kernels(isa);
  MOE_CHECK(kernels != nullptr,
            "instruction set \"",
            isa,
            "\" is not available here; the best is \"",
            cpu::best_row_kernels().name,
            "\"");
  return *kernels;
}

}  // namespace

std::shared_ptr<Endpoint> Endpoint::create(std::shared_ptr<group::Group> group,
                                           EndpointConfig config,
                                           const group::InterruptCheck& interrupt_check) {
  if (group->nodes().num_nodes() > 1)
    config.agreed.emplace_back("rail", config.rail ? config.rail->name() : "sockets");
  const auto endpoint = share_buffer(new Endpoint(std::move(group), std::move(config)));
  try {
    endpoint->connect(endpoint->config().depth, "", interrupt_check);
  } catch (const InvalidArgument&) {
    throw;  // on every rank alike: nobody has a buffer that could write here
  } catch (...) {
    endpoint->give_up_connecting();
    throw;
  }
  endpoint->group().add_recoverable(endpoint->buffer_number(), endpoint);
  return endpoint;
}

Endpoint::Endpoint(std::shared_ptr<group::Group> group, EndpointConfig config)
    : EndpointBase(std::move(group), std::move(config)),
      kernels_(&choose_kernels(this->config().isa)),
      cache_bytes_(cpu::last_level_cache_bytes()),
      threads_(this->group().num_threads()),
      rail_(this->config().rail),
      rail_buffers_(kMostKeptRailBytes),
      readable_(static_cast<size_t>(this->config().depth)) {
  if (rail_)
    listen();
}

Endpoint::~Endpoint() {
  destroy({});
}

void Endpoint::listen() {
  rail_->set_listener([group = shared_group()] { sync::ring(group->own_doorbell()); });
}

Rail& Endpoint::rail() {
  const std::lock_guard<sync::Mutex> lock(rail_mutex_);
  if (rail_ == nullptr) {
    rail_ = group::make_socket_rail(group(), buffer_number());
    listen();
  }
  return *rail_;
}

Endpoint::InternodeBytes Endpoint::internode_bytes() const {
  const std::lock_guard<sync::Mutex> lock(rail_mutex_);
  InternodeBytes bytes = bytes_of_former_rails_;
  if (rail_) {
    bytes.sent += rail_->sent_bytes();
    bytes.received += rail_->received_bytes();
  }
  return bytes;
}

void Endpoint::restart(uint64_t next_epoch) {
  EndpointBase::restart(next_epoch);
  for (auto& windows : readable_)
    windows.clear();
  // The next operation makes another, over the sockets: an engine cannot drop what was under way.
  retire_rail("the communicator has recovered");
}

void Endpoint::end_device_operations() {
  retire_rail("the buffer was destroyed");
  for (auto& windows : readable_)
    for (auto& window : windows)
      add_control_window(std::move(window));
  readable_.clear();
}

void Endpoint::retire_rail(const std::string& reason) {
  std::shared_ptr<Rail> rail;
  {
    const std::lock_guard<sync::Mutex> lock(rail_mutex_);
    rail = std::move(rail_);
  }
  if (rail == nullptr)
    return;
  rail->give_up(reason);
  const std::lock_guard<sync::Mutex> lock(rail_mutex_);
  bytes_of_former_rails_.sent += rail->sent_bytes();
  bytes_of_former_rails_.received += rail->received_bytes();
}

cpu::StoreMode Endpoint::store_mode(int64_t total_bytes) const {
  return cpu::store_mode_of_results(total_bytes, cache_bytes_);
}

void Endpoint::for_tokens(int64_t num_tokens,
                          int64_t total_bytes,
                          const std::function<void(int64_t, int64_t)>& body) {
  if (total_bytes < cpu::kBytesWorthAThread)
    body(0, num_tokens);
  else
    threads_.parallel_for(num_tokens, body);
}

}  // namespace moe::ops
