#include "host/endpoint.h"

#include "host/machine_cache.h"

namespace moe::host {

namespace {

constexpr int64_t kBytesWorthAThread = int64_t{1} << 20;

const RowKernels& choose_kernels(const std::string& isa) {
  if (isa.empty())
    return best_row_kernels();
  const RowKernels* kernels = find_row_kernels(isa);
  MOE_CHECK(kernels != nullptr,
            "instruction set \"",
            isa,
            "\" is not available here; the best is \"",
            best_row_kernels().name,
            "\"");
  return *kernels;
}

}  // namespace

std::shared_ptr<Endpoint> Endpoint::create(std::shared_ptr<Group> group,
                                           EndpointConfig config,
                                           const InterruptCheck& interrupt_check) {
  const auto endpoint = share_endpoint(new Endpoint(std::move(group), std::move(config)));
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

Endpoint::Endpoint(std::shared_ptr<Group> group, EndpointConfig config)
    : EndpointBase(std::move(group), std::move(config)),
      kernels_(&choose_kernels(this->config().isa)),
      cache_bytes_(last_level_cache_bytes()),
      threads_(this->group().num_threads()) {}

Endpoint::~Endpoint() {
  destroy({});
}

StoreMode Endpoint::store_mode(int64_t total_bytes) const {
  return total_bytes > cache_bytes_ ? StoreMode::kStreaming : StoreMode::kCached;
}

void Endpoint::for_tokens(int64_t num_tokens,
                          int64_t total_bytes,
                          const std::function<void(int64_t, int64_t)>& body) {
  if (total_bytes < kBytesWorthAThread)
    body(0, num_tokens);
  else
    threads_.parallel_for(num_tokens, body);
}

}  // namespace moe::host
