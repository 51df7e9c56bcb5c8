#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moe {

/// A caller's mistake; becomes ValueError in Python. The message has both values.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// A caller passed an object of the wrong type; becomes TypeError in Python.
class InvalidType : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The operating system refused something; becomes OSError in Python.
class SystemError : public std::runtime_error {
 public:
  SystemError(const std::string& what, int error_number)
      : std::runtime_error(what), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

/// The heap cannot hold what was asked for; becomes CapacityError in Python.
class CapacityError : public std::runtime_error {
 public:
  CapacityError(const std::string& what, uint64_t needed_bytes, uint64_t available_bytes)
      : std::runtime_error(what), needed_bytes(needed_bytes), available_bytes(available_bytes) {}

  uint64_t needed_bytes;
  uint64_t available_bytes;
  std::vector<int> ranks;
  std::vector<int64_t> needed_rows;
};

/// Place in an operation, and the ranks, with which it ended.
struct FailureSite {
  std::vector<int> ranks;
  std::string operation;
  std::string phase;
  int64_t epoch = -1;
};

/// A peer died, left or gave up; becomes PeerFailedError in Python.
class PeerFailed : public std::runtime_error {
 public:
  PeerFailed(const std::string& what, FailureSite site)
      : std::runtime_error(what), site(std::move(site)) {}
  FailureSite site;
};

/// A living peer did not arrive or stopped progressing; becomes PeerTimeoutError in Python.
class PeerTimeout : public std::runtime_error {
 public:
  PeerTimeout(const std::string& what, FailureSite site)
      : std::runtime_error(what), site(std::move(site)) {}
  FailureSite site;
};

/// Peers declared this rank failed and go on without it; becomes EvictedError in Python.
class Evicted : public std::runtime_error {
 public:
  Evicted(const std::string& what, FailureSite site)
      : std::runtime_error(what), site(std::move(site)) {}
  FailureSite site;
};

/// One buffer used from two threads at once; becomes RuntimeError in Python.
class ConcurrentUse : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Joins its arguments with operator<<.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace moe

#define MOE_CHECK(condition, ...)                               \
  do {                                                          \
    if (!(condition)) [[unlikely]]                              \
      throw ::moe::InvalidArgument(::moe::concat(__VA_ARGS__)); \
  } while (false)

#define MOE_CHECK_EQ(left, right, what) \
  MOE_CHECK((left) == (right),          \
            what,                       \
            ": expected ",              \
            #left,                      \
            " == ",                     \
            #right,                     \
            ", got ",                   \
            (left),                     \
            " and ",                    \
            (right))
