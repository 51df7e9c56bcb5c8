#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace moe {

// Threads, addresses and pages that the system grants this process.

/// Bytes that RLIMIT_AS leaves; UINT64_MAX where there is no limit.
uint64_t address_space_left_bytes();

/// RLIMIT_AS and what it leaves, with "; " in front; empty where there is no limit.
std::string describe_address_space();

uint64_t system_page_bytes();

/// Maps whole pages into this process, with memory where there was none, as a fault for each takes
/// longer. A hint: false, and errno says why, where the system cannot (before Linux 5.14).
bool map_pages(std::byte* data, uint64_t bytes);

/// Starts a thread that takes no signals, so that the main thread's handlers run in the main
/// thread.
///
/// @param deed  Deed of the thread, for the message: "hears of peers".
/// @throws SystemError  the system refuses one; says how large its stack is, and which limits there
///   are.
std::thread start_quiet_thread(const char* deed, std::function<void()> body);

}  // namespace moe
