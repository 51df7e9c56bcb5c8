#include "heap/wire.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>

#include "core/error.h"
#include "core/rank_list.h"

namespace moe::heap {
namespace {

/// @throws InvalidArgument  when not all values of the ranks from @p first_rank on, @p num_ranks of
///   them, are equal: "<what>: ranks 0, 1: a; rank 2: b".
void check_same(const std::string& what,
                const std::vector<std::string>& value_of_rank,
                int first_rank,
                int num_ranks) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (int rank = first_rank; rank < first_rank + num_ranks; ++rank)
    ranks_of[value_of_rank[static_cast<size_t>(rank)]].push_back(rank);
  if (ranks_of.size() <= 1)
    return;
  std::string text;
  for (const auto& [value, ranks] : ranks_of)
    text += (text.empty() ? "" : "; ") + rank_list(ranks) + ": " + value;
  throw InvalidArgument(concat(what, ": ", text));
}

void check_versions(const std::vector<std::string>& addresses) {
  std::vector<std::string> versions;
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    uint32_t head[2] = {0, 0};
    if (addresses[rank].size() >= sizeof head)
      std::memcpy(head, addresses[rank].data(), sizeof head);
    MOE_CHECK(head[0] == kWireMagic,
              "the address of rank ",
              rank,
              " is not one of PeerMesh: got ",
              addresses[rank].size(),
              " bytes that start with ",
              head[0],
              ", expected ",
              kWireMagic);
    versions.push_back(concat("version ", head[1], " of ", addresses[rank].size(), " bytes"));
  }
  check_same("ranks run releases with different wire formats",
             versions,
             0,
             static_cast<int>(addresses.size()));
}

/// Checks that other nodes can reach every rank.
void check_reachable(const std::vector<MeshAddress>& addresses) {
  for (size_t rank = 0; rank < addresses.size(); ++rank)
    MOE_CHECK(addresses[rank].tcp_port != 0 && addresses[rank].num_tcp_addresses > 0 &&
                  addresses[rank].num_tcp_addresses <= MeshAddress::kMaxTcpAddresses,
              "rank ",
              rank,
              " cannot be reached from other nodes: its port is ",
              addresses[rank].tcp_port,
              ", its addresses are ",
              addresses[rank].num_tcp_addresses,
              " of at most ",
              MeshAddress::kMaxTcpAddresses);
}

}  // namespace

Token random_token() {
  Token token{};
  if (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size()))
    throw SystemError("getrandom failed", errno);
  return token;
}

std::string token_text(const Token& token) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : token) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string MeshAddress::boot_id_text() const {
  const auto end = std::find(boot_id.begin(), boot_id.end(), '\0');
  return std::string(boot_id.begin(), end);
}

std::string MeshAddress::to_bytes() const {
  return std::string(reinterpret_cast<const char*>(this), sizeof *this);
}

std::vector<MeshAddress> parse_addresses(const std::vector<std::string>& addresses,
                                         const NodeLayout& nodes) {
  std::vector<MeshAddress> parsed(addresses.size());
  std::vector<std::string> boot_ids;
  std::vector<std::string> namespaces;
  std::map<Token, int> rank_of;
  check_versions(addresses);
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    MOE_CHECK(addresses[rank].size() == sizeof(MeshAddress),
              "the address of rank ",
              rank,
              " has ",
              addresses[rank].size(),
              " bytes, expected ",
              sizeof(MeshAddress));
    std::memcpy(&parsed[rank], addresses[rank].data(), sizeof(MeshAddress));
    boot_ids.push_back("boot id " + parsed[rank].boot_id_text());
    namespaces.push_back(concat("network namespace ", parsed[rank].network_namespace));
    const auto [found, is_new] = rank_of.emplace(parsed[rank].mesh_token, static_cast<int>(rank));
    MOE_CHECK(is_new,
              "ranks ",
              found->second,
              " and ",
              rank,
              " have the same address ",
              token_text(parsed[rank].mesh_token));
  }
  for (int node_idx = 0; node_idx < nodes.num_nodes(); ++node_idx) {
    const int first_rank = nodes.rank_of(node_idx, 0);
    const std::string whose =
        nodes.num_nodes() == 1 ? "all ranks" : concat("all ranks of node ", node_idx);
    check_same(concat("shared memory needs ", whose, " on one machine"),
               boot_ids,
               first_rank,
               nodes.num_local_ranks);
    check_same(concat("shared memory needs ", whose, " in one network namespace"),
               namespaces,
               first_rank,
               nodes.num_local_ranks);
  }
  if (nodes.num_nodes() > 1)
    check_reachable(parsed);
  return parsed;
}

}  // namespace moe::heap
