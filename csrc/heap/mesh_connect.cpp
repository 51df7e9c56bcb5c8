#include "heap/mesh_connect.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <string>

#include "core/error.h"
#include "heap/remote_dial.h"
#include "heap/socket.h"

namespace moe::heap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMs = 100;
constexpr auto kProbeEvery = std::chrono::milliseconds(100);
// A rank that finds another's end stays that long: else its own end would be taken for the cause.
constexpr auto kLinger = std::chrono::milliseconds(300);
// Over TCP a refusal may be a firewall's or a stranger's: it has to repeat itself.
constexpr auto kRoundEvery = std::chrono::milliseconds(100);
constexpr auto kRemoteProbeEvery = std::chrono::milliseconds(1000);
constexpr int kMostRefusals = 3;
constexpr double kLongestTimeout = 1e9;  // seconds that fit the clock

/// A socket whose Hello has not arrived whole.
struct Greeting {
  OwnedFd socket;
  int rank_idx = -1;  ///< rank that this rank dialled; -1 for a caller who has not said
  Hello hello;
  size_t num_bytes = 0;
};

/// The way to a rank of another node: dialled when it is below this one, else only tried, to see
/// whether it still listens.
struct RemoteWay {
  explicit RemoteWay(const MeshAddress& target) : dial(target) {}

  RemoteDial dial;
  int num_refusals = 0;  ///< rounds in a row
  Clock::time_point next_round = Clock::now();
};

class MeshConnector {
 public:
  MeshConnector(int rank_idx,
                const std::vector<MeshAddress>& addresses,
                const NodeLayout& nodes,
                const Listeners& listeners)
      : rank_idx_(rank_idx),
        addresses_(addresses),
        nodes_(nodes),
        listeners_(listeners),
        sockets_(addresses.size()) {
    for (int peer_rank = 0; peer_rank < nodes.num_ranks; ++peer_rank)
      if (!is_local(peer_rank))
        remote_ways_.emplace(peer_rank, RemoteWay(address(peer_rank)));
    for (auto& [peer_rank, way] : remote_ways_)
      if (peer_rank > rank_idx)
        way.next_round += kRemoteProbeEvery;
  }

  std::vector<OwnedFd> run(double timeout_s, const std::function<void()>& interrupt_check) {
    try {
      return connect_all(timeout_s, interrupt_check);
    } catch (const PeerFailed&) {
      linger();
      throw;
    }
  }

 private:
  std::vector<OwnedFd> connect_all(double timeout_s, const std::function<void()>& interrupt_check) {
    const auto limit = std::chrono::duration<double>(std::min(timeout_s, kLongestTimeout));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    int next_dial = 0;
    while (true) {
      while (next_dial < rank_idx_ && (!is_local(next_dial) || dial(next_dial)))
        ++next_dial;
      const bool is_behind = next_dial < rank_idx_;
      hear_callers();
      for (auto& [peer_rank, way] : remote_ways_)
        if (!sockets_[static_cast<size_t>(peer_rank)])
          try_way(peer_rank, way);
      const std::string missing = missing_ranks();
      if (missing.empty())
        return std::move(sockets_);
      if (Clock::now() >= next_probe_) {
        next_probe_ = Clock::now() + kProbeEvery;
        probe_callers();
      }
      if (Clock::now() >= deadline)
        throw SystemError(concat("rank ",
                                 rank_idx_,
                                 " waited ",
                                 timeout_s,
                                 " s for the sockets of its peers; did not connect: ",
                                 missing,
                                 dialled_text()),
                          ETIMEDOUT);
      if (interrupt_check)
        interrupt_check();
      wait(is_behind, deadline);
    }
  }

  void linger() {
    const auto deadline = Clock::now() + kLinger;
    while (Clock::now() < deadline) {
      try {
        hear_callers();
      } catch (const PeerFailed&) {  // another one, or the same again
      }
      wait(true, deadline);
    }
  }

  /// @return False when the listener has too many callers for now.
  bool dial(int peer_rank) {
    OwnedFd socket = connect_abstract(listener_name(address(peer_rank).mesh_token));
    if (!socket) {
      if (errno == EAGAIN)
        return false;
      fail(peer_rank,
           concat("rank ",
                  peer_rank,
                  " cannot be reached from rank ",
                  rank_idx_,
                  ": nobody listens; it has ended, or it runs on another machine"));
    }
    greet_or_fail(socket, peer_rank);
    greetings_.push_back({std::move(socket), peer_rank, Hello{}, 0});
    return true;
  }

  [[noreturn]] static void fail(int peer_rank, const std::string& message) {
    throw PeerFailed(message, FailureSite{{peer_rank}, "connect", "idle", -1});
  }

  /// A rank that still has to dial this one listens until it has; one that does not listen and has
  /// not dialled has ended.
  void probe_callers() {
    for (int peer_rank = rank_idx_ + 1; peer_rank < static_cast<int>(sockets_.size());
         ++peer_rank) {
      if (sockets_[static_cast<size_t>(peer_rank)] || !is_local(peer_rank))
        continue;
      if (connect_abstract(listener_name(address(peer_rank).mesh_token)) || errno != ECONNREFUSED)
        continue;
      // It may have dialled just before it stopped listening.
      hear_callers();
      if (!sockets_[static_cast<size_t>(peer_rank)])
        fail(peer_rank,
             concat("rank ", peer_rank, " ended before it connected to rank ", rank_idx_));
    }
  }

  /// One step on the way to a rank of another node.
  void try_way(int peer_rank, RemoteWay& way) {
    const bool is_probe = peer_rank > rank_idx_;
    for (OwnedFd& socket : way.dial.take_connected()) {
      way.num_refusals = 0;
      if (is_probe)
        continue;  // it listens, so it will dial
      if (greet(socket, peer_rank))
        greetings_.push_back({std::move(socket), peer_rank, Hello{}, 0});
      else
        way.dial.note_hang_up();
    }
    const bool is_greeted =
        std::any_of(greetings_.begin(), greetings_.end(), [&](const Greeting& greeting) {
          return greeting.rank_idx == peer_rank;
        });
    if (way.dial.is_trying() || is_greeted || Clock::now() < way.next_round)
      return;
    way.num_refusals = way.dial.is_refused() ? way.num_refusals + 1 : 0;
    if (way.num_refusals >= kMostRefusals) {
      hear_callers();
      if (!sockets_[static_cast<size_t>(peer_rank)])
        fail(peer_rank,
             concat("rank ",
                    peer_rank,
                    " on node ",
                    nodes_.node_idx(peer_rank),
                    " cannot be reached from rank ",
                    rank_idx_,
                    ": nobody listens, it has ended (",
                    way.dial.text(),
                    ")"));
      return;
    }
    way.dial.start();
    way.next_round = Clock::now() + (is_probe ? kRemoteProbeEvery : kRoundEvery);
  }

  /// Accepts who dials and reads what they say.
  void hear_callers() {
    for (const OwnedFd* listener : {&listeners_.unix_socket, &listeners_.tcp_socket})
      while (OwnedFd socket = *listener ? accept_connection(*listener) : OwnedFd())
        greetings_.push_back({std::move(socket), -1, Hello{}, 0});
    std::erase_if(greetings_, [this](Greeting& greeting) { return read_hello(greeting); });
  }

  /// @return Whether the other end took it.
  bool greet(const OwnedFd& socket, int peer_rank) {
    Hello hello;
    hello.rank_idx = rank_idx_;
    hello.sender = address(rank_idx_).mesh_token;
    hello.receiver = address(peer_rank).mesh_token;
    size_t sent_bytes = 0;
    const std::string_view bytes(reinterpret_cast<const char*>(&hello), sizeof hello);
    send_bytes(socket.get(), bytes, {}, -1, &sent_bytes);
    // A new socket takes these few bytes at once unless the peer has gone.
    return sent_bytes == sizeof hello;
  }

  void greet_or_fail(const OwnedFd& socket, int peer_rank) {
    if (!greet(socket, peer_rank))
      fail(peer_rank, concat("rank ", peer_rank, " hung up on rank ", rank_idx_));
  }

  /// @return Whether the greeting is over: its socket is in sockets_, or closed as a stranger's.
  bool read_hello(Greeting& greeting) {
    std::vector<OwnedFd> passed_fds;
    size_t received_bytes = 0;
    const Transfer transfer =
        receive_bytes(greeting.socket.get(),
                      reinterpret_cast<char*>(&greeting.hello) + greeting.num_bytes,
                      sizeof(Hello) - greeting.num_bytes,
                      &received_bytes,
                      &passed_fds);
    if (transfer == Transfer::kWouldBlock)
      return false;
    if (transfer != Transfer::kMoved) {
      // At a TCP address may be somebody else, or the peer has taken another of several sockets.
      const auto way = remote_ways_.find(greeting.rank_idx);
      if (way != remote_ways_.end())
        way->second.dial.note_hang_up();
      else if (greeting.rank_idx >= 0)
        fail(greeting.rank_idx,
             concat(
                 "rank ", greeting.rank_idx, " hung up on rank ", rank_idx_, " while connecting"));
      return true;
    }
    greeting.num_bytes += received_bytes;
    if (greeting.num_bytes < sizeof(Hello))
      return false;
    if (!is_peer(greeting))
      return true;
    if (greeting.rank_idx < 0)
      greet_or_fail(greeting.socket, greeting.hello.rank_idx);
    sockets_[static_cast<size_t>(greeting.hello.rank_idx)] = std::move(greeting.socket);
    return true;
  }

  /// Only a rank of this bootstrap knows the tokens: anybody may dial an abstract name.
  bool is_peer(const Greeting& greeting) const {
    const Hello& hello = greeting.hello;
    if (hello.magic != kWireMagic || hello.rank_idx < 0 ||
        hello.rank_idx >= static_cast<int>(addresses_.size()))
      return false;
    const bool is_expected =
        greeting.rank_idx < 0 ? hello.rank_idx > rank_idx_ : hello.rank_idx == greeting.rank_idx;
    return is_expected && hello.sender == address(hello.rank_idx).mesh_token &&
           hello.receiver == address(rank_idx_).mesh_token &&
           !sockets_[static_cast<size_t>(hello.rank_idx)];
  }

  std::string missing_ranks() const {
    std::string text;
    for (size_t rank = 0; rank < sockets_.size(); ++rank)
      if (!sockets_[rank] && static_cast<int>(rank) != rank_idx_)
        text += (text.empty() ? "rank " : ", ") + std::to_string(rank);
    return text;
  }

  /// Text about addresses that did not lead to their ranks; "" for none.
  std::string dialled_text() const {
    std::string text;
    for (const auto& [peer_rank, way] : remote_ways_)
      if (!sockets_[static_cast<size_t>(peer_rank)] && peer_rank < rank_idx_)
        text += concat("; rank ", peer_rank, " at ", way.dial.text());
    return text;
  }

  bool is_local(int peer_rank) const { return nodes_.is_same_node(peer_rank, rank_idx_); }

  /// Sleeps until a socket has something to say, some moments at most.
  void wait(bool is_behind, Clock::time_point deadline) const {
    // A negative descriptor is skipped.
    std::vector<pollfd> polled{{listeners_.unix_socket.get(), POLLIN, 0},
                               {listeners_.tcp_socket.get(), POLLIN, 0}};
    for (const Greeting& greeting : greetings_)
      polled.push_back({greeting.socket.get(), POLLIN, 0});
    for (const auto& [peer_rank, way] : remote_ways_)
      way.dial.add_polled(&polled);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    const int limit_ms = is_behind ? 1 : kPollMs;
    ::poll(polled.data(),
           polled.size(),
           std::clamp(static_cast<int>(std::min<int64_t>(left.count(), limit_ms)), 0, limit_ms));
  }

  const MeshAddress& address(int rank_idx) const {
    return addresses_[static_cast<size_t>(rank_idx)];
  }

  int rank_idx_;
  const std::vector<MeshAddress>& addresses_;
  const NodeLayout nodes_;
  const Listeners& listeners_;
  std::map<int, RemoteWay> remote_ways_;  ///< by rank
  std::vector<Greeting> greetings_;
  std::vector<OwnedFd> sockets_;
  Clock::time_point next_probe_ = Clock::now() + kProbeEvery;
};

}  // namespace

std::string listener_name(const Token& mesh_token) {
  return "moe_comm-" + token_text(mesh_token);
}

std::vector<OwnedFd> connect_mesh(int rank_idx,
                                  const std::vector<MeshAddress>& addresses,
                                  const NodeLayout& nodes,
                                  const Listeners& listeners,
                                  double timeout_s,
                                  const std::function<void()>& interrupt_check) {
  return MeshConnector(rank_idx, addresses, nodes, listeners).run(timeout_s, interrupt_check);
}

}  // namespace moe::heap
