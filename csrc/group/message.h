#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moe::group {

/// Appends the bytes of @p value to a message for ranks of this machine type.
template <typename Value>
void append_value(std::string* bytes, const Value& value) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// Reads what append_value() wrote at @p position, and moves past it.
template <typename Value>
Value read_value(const std::string& bytes, size_t* position) {
  Value value{};
  if (*position + sizeof(value) > bytes.size())
    throw std::runtime_error("a control message is shorter than its contents");
  std::memcpy(&value, bytes.data() + *position, sizeof(value));
  *position += sizeof(value);
  return value;
}

/// Epochs of one buffer that a rank states when ranks agree on where they stand.
struct BufferEpochs {
  uint64_t buffer_number;
  uint64_t next_epoch;
  uint64_t last_completed;
};

}  // namespace moe::group
