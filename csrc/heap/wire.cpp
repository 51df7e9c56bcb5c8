#include "heap/wire.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>

#include "core/error.h"

namespace moe::heap {
namespace {

/// "ranks 0, 2" for a message.
std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// @throws InvalidArgument  when not all values are equal: "<what>: ranks 0, 1 have a; rank 2 has
/// b".
void check_same(const std::string& what, const std::vector<std::string>& value_of_rank) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < value_of_rank.size(); ++rank)
    ranks_of[value_of_rank[rank]].push_back(static_cast<int>(rank));
  if (ranks_of.size() <= 1)
    return;
  std::string text;
  for (const auto& [value, ranks] : ranks_of)
    text += (text.empty() ? "" : "; ") + rank_list(ranks) + ": " + value;
  throw InvalidArgument(concat(what, ": ", text));
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

std::vector<MeshAddress> parse_addresses(const std::vector<std::string>& addresses) {
  std::vector<MeshAddress> parsed(addresses.size());
  std::vector<std::string> versions;
  std::vector<std::string> boot_ids;
  std::vector<std::string> namespaces;
  std::map<Token, int> rank_of;
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
  check_same("ranks run releases with different wire formats", versions);
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
  check_same("shared memory needs all ranks on one machine", boot_ids);
  check_same("shared memory needs all ranks in one network namespace", namespaces);
  return parsed;
}

std::string make_frame(const FrameHeader& header, const std::string& payload) {
  std::string bytes(sizeof header + payload.size(), '\0');
  std::memcpy(bytes.data(), &header, sizeof header);
  if (!payload.empty())
    std::memcpy(bytes.data() + sizeof header, payload.data(), payload.size());
  return bytes;
}

}  // namespace moe::heap
