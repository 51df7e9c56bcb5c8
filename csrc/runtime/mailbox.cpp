#include "runtime/mailbox.h"

#include <cstring>

#include "core/math.h"
#include "core/text.h"
#include "layout/workspace.h"
#include "runtime/device_memory.h"

namespace moe::runtime {

using layout::Row;

Mailbox::Mailbox(Device& device, int num_ranks, int num_experts)
    : row_stride_(Row::stride(num_ranks, num_experts)) {
  const auto lay = [&](Suballocator suballocator) {
    suballocator.take<kernels::HostRead>(1);
    suballocator.take<std::byte>(num_ranks * row_stride_);
    message_ = suballocator.take<char>(Row::kMessageBytes);
    ranks_ = suballocator.take<std::byte>(num_ranks);
    return suballocator.bytes();
  };
  memory_ = device.allocate_host(lay(Suballocator(nullptr)));
  lay(Suballocator(memory_.get()));
}

const Row& Mailbox::row(int rank_idx) const {
  return *reinterpret_cast<const Row*>(
      offset_ptr(reinterpret_cast<std::byte*>(header() + 1), rank_idx, row_stride_));
}

const layout::SecondOffer& Mailbox::second_offer(int rank_idx) const {
  return reinterpret_cast<const layout::SecondOffer*>(header() + 1)[rank_idx];
}

const char* Mailbox::write_message(const std::string& text) const {
  store_text(message_, Row::kMessageBytes, text);
  return message_;
}

const std::byte* Mailbox::write_ranks(const std::vector<uint8_t>& values) const {
  std::memcpy(ranks_, values.data(), values.size());
  return ranks_;
}

}  // namespace moe::runtime
