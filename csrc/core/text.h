#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <string>

namespace moe {

/// Stores @p text, and zeros up to @p num_bytes, one at least. What is too long is cut between
/// characters: readers take it for UTF-8.
inline void store_text(char* target, size_t num_bytes, const std::string& text) {
  size_t length = std::min(text.size(), num_bytes - 1);
  while (length > 0 && length < text.size() && (text[length] & 0xC0) == 0x80)
    --length;
  std::memcpy(target, text.data(), length);
  std::memset(target + length, 0, num_bytes - length);
}

template <size_t kBytes>
void store_text(char (&target)[kBytes], const std::string& text) {
  store_text(target, kBytes, text);
}

/// Text of @p error.
inline std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an exception without a message";
  }
}

}  // namespace moe
