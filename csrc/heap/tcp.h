#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "heap/owned_fd.h"

namespace moe::heap {

/// An IPv4 or IPv6 address that other machines understand.
///
/// Byte map (20 bytes): [0, 2) 4 or 6, 0 for none; [2, 4) zero; [4, 20) the address in network
/// order, an IPv4 one in its first 4 bytes.
struct IpAddress {
  uint16_t version = 0;
  uint16_t reserved = 0;
  std::array<uint8_t, 16> bytes{};

  std::string text() const;
  friend bool operator==(const IpAddress&, const IpAddress&) = default;
};
static_assert(sizeof(IpAddress) == 20);

/// Addresses and limits by which ranks of other nodes reach this one.
struct TcpOptions {
  /// All ranks see this machine's loopback interface.
  bool is_one_machine = true;
  /// Names of network interfaces with commas between; the first that are there count. "" leaves the
  /// choice to the others.
  std::string interfaces;
  /// A host that all ranks know; the interface that leads there comes first. "" for none.
  std::string route_to;
};

/// Addresses of this machine under which peers can try to reach it, the best first, at most @p
/// most.
///
/// Those of the interfaces named, if any are; else loopback where that reaches everybody; else the
/// one that leads to TcpOptions::route_to, and those of all other interfaces that are up.
/// @throws InvalidArgument  no interface has one of the names, or none of them an address; names
///   those there are.
/// @throws SystemError
std::vector<IpAddress> find_tcp_addresses(const TcpOptions& options, size_t most);

/// A listening socket at a port that was free: at @p address alone, or, with version 0, at every
/// address of this machine.
/// @throws SystemError
OwnedFd listen_tcp(const IpAddress& address, uint16_t* port);

/// A socket on its way to an address: it becomes writable when it is there or has failed. Empty,
/// with errno, where it has failed already.
/// @throws SystemError  no socket can be had.
OwnedFd dial_tcp(const IpAddress& address, uint16_t port);

/// Outcome of a dialled socket: 0 or an error number.
int dial_error(const OwnedFd& socket);

/// Small messages go at once, and the machine of an idle peer is asked now and then whether it is
/// there.
/// @throws SystemError
void prepare_tcp(const OwnedFd& socket, double limit_s);

/// Returns whether the machine at the other end owes an answer and has given none for @p limit_s.
/// One look may fall between a question and its answer.
bool is_tcp_silent(const OwnedFd& socket, double limit_s);

}  // namespace moe::heap
