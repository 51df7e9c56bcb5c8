#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/node_layout.h"
#include "heap/tcp.h"

namespace moe::heap {

/// 16 random bytes: an identity that nobody else has and nobody can guess.
using Token = std::array<uint8_t, 16>;

Token random_token();
std::string token_text(const Token& token);

constexpr uint32_t kWireMagic = 0x4D4F4541;
constexpr uint32_t kWireVersion = 2;

/// Introduction of a rank to the others, through the bootstrap, before there are sockets.
///
/// Byte map (236 bytes, padded to 240):
///   [0, 4)      kWireMagic
///   [4, 8)      kWireVersion
///   [8, 24)     process token: equal for ranks that are threads of one process
///   [24, 40)    mesh token: names the listening socket and proves who connects
///   [40, 48)    inode of the network namespace, in which abstract socket names live
///   [48, 112)   boot id of the machine, text, zero-padded
///   [112, 114)  TCP port, 0 where this rank listens on none
///   [114, 116)  how many of the TCP addresses count
///   [116, 236)  TCP addresses, the best first
struct MeshAddress {
  static constexpr size_t kMaxTcpAddresses = 6;

  uint32_t magic = kWireMagic;
  uint32_t version = kWireVersion;
  Token process_token{};
  Token mesh_token{};
  uint64_t network_namespace = 0;
  std::array<char, 64> boot_id{};
  uint16_t tcp_port = 0;
  uint16_t num_tcp_addresses = 0;
  std::array<IpAddress, kMaxTcpAddresses> tcp_addresses{};
  uint32_t padding = 0;

  std::string boot_id_text() const;
  std::string to_bytes() const;
};
static_assert(sizeof(MeshAddress) == 240);

/// Parses the addresses of all ranks and checks that those of a node can talk over Unix sockets,
/// and all over TCP where there are several nodes.
///
/// Every rank sees all addresses, so every rank comes to the same verdict alone.
///
/// @throws InvalidArgument  ranks with different wire versions, ranks of one node on different
///   machines or in different network namespaces, or two ranks with one address; names the ranks
///   and both values.
std::vector<MeshAddress> parse_addresses(const std::vector<std::string>& addresses,
                                         const NodeLayout& nodes);

/// First bytes on every socket, in both directions.
///
/// Byte map (48 bytes):
///   [0, 4)    kWireMagic
///   [4, 8)    rank_idx of the sender
///   [8, 24)   mesh token of the sender
///   [24, 40)  mesh token of the receiver
///   [40, 48)  zero
struct Hello {
  uint32_t magic = kWireMagic;
  int32_t rank_idx = -1;
  Token sender{};
  Token receiver{};
  uint64_t reserved = 0;
};
static_assert(sizeof(Hello) == 48);

enum class FrameKind : uint32_t {
  kMessage = 1,  ///< payload for (channel, sequence)
  kSegment =
      2,  ///< channel is segment_idx, sequence its bytes; with_fd says whether a memfd comes along
  kBye = 3,     ///< last frame of a rank that leaves in good order
  kMemory = 4,  ///< like kSegment, but no file: the payload says how to open it
};

/// Head of every frame behind the Hello.
///
/// Byte map (32 bytes):
///   [0, 4)    kind
///   [4, 8)    with_fd
///   [8, 16)   channel
///   [16, 24)  sequence
///   [24, 32)  payload bytes that follow
struct FrameHeader {
  FrameKind kind = FrameKind::kMessage;
  uint32_t with_fd = 0;
  uint64_t channel = 0;
  uint64_t sequence = 0;
  uint64_t payload_bytes = 0;
};
static_assert(sizeof(FrameHeader) == 32);

/// 1 MiB of a caller's, and the name of its call.
constexpr uint64_t kMaxPayloadBytes = (uint64_t{1} << 20) + 4096;

}  // namespace moe::heap
