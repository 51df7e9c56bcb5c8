#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "simt/primitives.h"

// What programs that test the emulator share: `program <case>` prints "ok", or what was found
// instead.

namespace moe::cases {

inline void expect(bool condition, const std::string& what) {
  if (!condition)
    throw std::runtime_error(what);
}

template <typename Found, typename Wanted>
void expect_equal(const Found& found, const Wanted& wanted, const std::string& what) {
  if (!(found == wanted))
    throw std::runtime_error(concat(what, ": expected ", wanted, ", got ", found));
}

/// The message of what @p body throws.
template <typename Error>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  throw std::runtime_error("nothing was thrown");
}

inline void expect_error(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    if (message.find(part) == std::string::npos)
      throw std::runtime_error(concat("no '", part, "' in: ", message));
}

/// Runs every launch at once, on the caller's thread.
class Immediate : public simt::Stream {
 public:
  void launch(simt::Kernel kernel) override {
    simt::launch_grid(scheduler, std::move(kernel));
    scheduler.run();
  }
  device::Launch shape(int num_blocks, int num_threads, size_t shared_bytes = 0) {
    return {num_blocks, num_threads, shared_bytes, static_cast<simt::Stream*>(this)};
  }
  simt::Scheduler scheduler;
};

struct Body {
  const std::function<void()>* run;
};

inline void run_body(Body body) {
  (*body.run)();
}

/// Runs @p body as a kernel.
inline void emulate(int num_blocks,
                    int num_threads,
                    size_t shared_bytes,
                    const std::function<void()>& body) {
  Immediate stream;
  device::launch(run_body, stream.shape(num_blocks, num_threads, shared_bytes), Body{&body});
}

inline std::string error_of_kernel(int num_threads, const std::function<void()>& body) {
  return message_of<simt::EmulationError>([&] { emulate(1, num_threads, 256, body); });
}

template <typename T>
T* shared_array() {
  return reinterpret_cast<T*>(device::shared_memory());
}

/// Two grids that wait for each other, five times.
struct Handshake {
  static constexpr uint32_t kNumRounds = 5;
  uint32_t flags[2] = {0, 0};

  void run(int rank_idx) {
    for (uint32_t round = 1; round <= kNumRounds; ++round) {
      if (device::block_idx() == 0 && device::thread_idx() == 0)
        device::store_release<device::Scope::kSystem>(&flags[rank_idx], round);
      while (device::load_acquire<device::Scope::kSystem>(&flags[1 - rank_idx]) < round)
        device::pause(10);
      device::sync_block();
    }
  }
};

inline std::map<std::string, void (*)()>& all_cases() {
  static std::map<std::string, void (*)()> cases;
  return cases;
}

inline int run_case(int argc, char** argv) {
  if (argc != 2 || !all_cases().contains(argv[1])) {
    std::puts("name one case: MOE_CASE(name)");
    return 2;
  }
  try {
    all_cases().at(argv[1])();
  } catch (const std::exception& error) {
    std::printf("%s: %s\n", argv[1], error.what());
    return 1;
  }
  std::puts("ok");
  return 0;
}

}  // namespace moe::cases

/// Defines a case, which tests find by this word: MOE_CASE(name) { ... }
#define MOE_CASE(name)                                              \
  static void name##_case();                                        \
  [[maybe_unused]] static const bool name##_is_known =              \
      ::moe::cases::all_cases().emplace(#name, name##_case).second; \
  static void name##_case()
