#include "heap/tcp.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>

#include "core/error.h"
#include "heap/link_timeouts.h"
#include "heap/socket.h"

namespace moe::heap {
namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketAddress to_socket_address(const IpAddress& address, uint16_t port) {
  SocketAddress result;
  if (address.version == 4) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(result.storage);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&v4.sin_addr, address.bytes.data(), sizeof v4.sin_addr);
    result.bytes = sizeof v4;
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(result.storage);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&v6.sin6_addr, address.bytes.data(), sizeof v6.sin6_addr);
    result.bytes = sizeof v6;
  }
  return result;
}

/// Version 0 for anything that is no IP address or means nothing on another machine.
IpAddress to_ip_address(const sockaddr* address) {
  IpAddress result;
  if (address == nullptr)
    return result;
  if (address->sa_family == AF_INET) {
    const auto& v4 = *reinterpret_cast<const sockaddr_in*>(address);
    result.version = 4;
    std::memcpy(result.bytes.data(), &v4.sin_addr, sizeof v4.sin_addr);
  } else if (address->sa_family == AF_INET6) {
    const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(address);
    // A link-local address is incomplete without the number of an interface of the machine that
    // dials it.
    if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr))
      return result;
    result.version = 6;
    std::memcpy(result.bytes.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  }
  return result;
}

bool is_loopback(const IpAddress& address) {
  constexpr std::array<uint8_t, 16> kLoopback6{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return address.version == 4 ? address.bytes[0] == 127 : address.bytes == kLoopback6;
}

OwnedFd open_tcp(int family) {
  return OwnedFd::open(
      [&] { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

struct Interface {
  std::string name;
  IpAddress address;
};

/// Addresses of all interfaces that are up, IPv4 first.
std::vector<Interface> list_interfaces() {
  ifaddrs* head = nullptr;
  if (::getifaddrs(&head) != 0)
    throw SystemError("getifaddrs failed", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(head, &::freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = head; entry != nullptr; entry = entry->ifa_next) {
    const IpAddress address = to_ip_address(entry->ifa_addr);
    if (address.version != 0 && (entry->ifa_flags & IFF_UP) != 0)
      interfaces.push_back({entry->ifa_name, address});
  }
  std::stable_sort(interfaces.begin(), interfaces.end(), [](const auto& a, const auto& b) {
    return a.address.version < b.address.version;
  });
  return interfaces;
}

/// Own address of packets to @p host; version 0 where there is no way.
IpAddress source_address(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* head = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &head) != 0)
    return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(head, &::freeaddrinfo);
  for (const addrinfo* entry = head; entry != nullptr; entry = entry->ai_next) {
    // Connecting a datagram socket sends nothing: it looks up the route.
    const OwnedFd probe = OwnedFd::open(
        [&] { return ::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
    sockaddr_storage own{};
    socklen_t bytes = sizeof own;
    if (probe && ::connect(probe.get(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&own), &bytes) == 0) {
      const IpAddress address = to_ip_address(reinterpret_cast<const sockaddr*>(&own));
      if (address.version != 0)
        return address;
    }
  }
  return {};
}

std::vector<IpAddress> addresses_of(const std::string& names,
                                    const std::vector<Interface>& interfaces) {
  std::vector<IpAddress> addresses;
  size_t start = 0;
  while (start <= names.size()) {
    const size_t end = std::min(names.find(',', start), names.size());
    for (const Interface& interface : interfaces)
      if (interface.name == names.substr(start, end - start))
        addresses.push_back(interface.address);
    start = end + 1;
  }
  if (addresses.empty()) {
    std::set<std::string> present;
    for (const Interface& interface : interfaces)
      present.insert(interface.name);
    std::string list;
    for (const std::string& name : present)
      list += (list.empty() ? "" : ", ") + name;
    throw InvalidArgument(
        concat("no network interface \"", names, "\" with an address; got ", list));
  }
  return addresses;
}

void set_option(const OwnedFd& socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket.get(), level, option, &value, sizeof value) != 0)
    throw SystemError(concat("setsockopt of ", name, " to ", value, " failed"), errno);
}

}  // namespace

std::string IpAddress::text() const {
  char buffer[INET6_ADDRSTRLEN] = "";
  if (version != 0)
    ::inet_ntop(version == 4 ? AF_INET : AF_INET6, bytes.data(), buffer, sizeof buffer);
  return buffer;
}

std::vector<IpAddress> find_tcp_addresses(const TcpOptions& options, size_t most) {
  const std::vector<Interface> interfaces = list_interfaces();
  std::vector<IpAddress> addresses;
  if (!options.interfaces.empty()) {
    addresses = addresses_of(options.interfaces, interfaces);
  } else if (options.is_one_machine) {
    for (const Interface& interface : interfaces)
      if (is_loopback(interface.address) && addresses.empty())
        addresses.push_back(interface.address);
    MOE_CHECK(!addresses.empty(), "several nodes on one machine need its loopback interface up");
  } else {
    if (!options.route_to.empty())
      addresses.push_back(source_address(options.route_to));
    for (const Interface& interface : interfaces)
      addresses.push_back(interface.address);
    // The host all ranks know may be this one, and the way there the loopback interface.
    std::erase_if(addresses,
                  [](const auto& address) { return address.version == 0 || is_loopback(address); });
    MOE_CHECK(!addresses.empty(),
              "ranks on several machines need a network interface that is up; this machine has ",
              interfaces.size(),
              " addresses, all of them loopback");
  }
  std::vector<IpAddress> distinct;
  for (const IpAddress& address : addresses)
    if (distinct.size() < most &&
        std::find(distinct.begin(), distinct.end(), address) == distinct.end())
      distinct.push_back(address);
  return distinct;
}

OwnedFd listen_tcp(const IpAddress& address, uint16_t* port) {
  SocketAddress target = to_socket_address(address, 0);
  OwnedFd listener = open_tcp(address.version == 4 ? AF_INET : AF_INET6);
  if (address.version == 0) {
    if (listener) {
      set_option(listener, IPPROTO_IPV6, IPV6_V6ONLY, 0, "IPV6_V6ONLY");
    } else {  // a machine without IPv6
      listener = open_tcp(AF_INET);
      IpAddress any;
      any.version = 4;
      target = to_socket_address(any, 0);
    }
  }
  if (!listener)
    throw SystemError("socket failed", errno);
  if (::bind(listener.get(), target.get(), target.bytes) != 0)
    throw SystemError(concat("bind to ", address.text(), " failed"), errno);
  if (::listen(listener.get(), kListenBacklog) != 0)
    throw SystemError("listen failed", errno);
  target.bytes = sizeof target.storage;
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&target.storage), &target.bytes) !=
      0)
    throw SystemError("getsockname failed", errno);
  // Both kinds of address have the port in the same place.
  *port = ntohs(reinterpret_cast<const sockaddr_in&>(target.storage).sin_port);
  return listener;
}

OwnedFd dial_tcp(const IpAddress& address, uint16_t port) {
  OwnedFd socket = open_tcp(address.version == 4 ? AF_INET : AF_INET6);
  if (!socket) {
    if (errno == EAFNOSUPPORT)  // a peer with IPv6, here without
      return socket;
    throw SystemError("socket failed", errno);
  }
  const SocketAddress target = to_socket_address(address, port);
  if (::connect(socket.get(), target.get(), target.bytes) == 0 || errno == EINPROGRESS ||
      errno == EINTR)
    return socket;
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

int dial_error(const OwnedFd& socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0)
    return errno;
  return error;
}

void prepare_tcp(const OwnedFd& socket, double limit_s) {
  // TCP_USER_TIMEOUT would also end a connection to a process that is stopped and reads nothing,
  // though its machine answers.
  const auto interval_s =
      static_cast<int>(std::clamp(limit_s / kLinkQuestions, 1.0, kMostKeepaliveS));
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, interval_s, "TCP_KEEPIDLE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval_s, "TCP_KEEPINTVL");
}

bool is_tcp_silent(const OwnedFd& socket, double limit_s) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0)
    return false;
  // Sent bytes, or a look at an idle peer or at one that takes no more for now.
  const bool is_owed = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
  return is_owed && info.tcpi_last_ack_recv >= limit_s * 1e3;
}

}  // namespace moe::heap
