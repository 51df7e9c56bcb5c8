#include "heap/peer_mesh.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <fstream>
#include <mutex>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "heap/link_timeouts.h"
#include "heap/listener_list.h"
#include "heap/mesh_connect.h"
#include "heap/peer_connection.h"
#include "heap/peer_segments.h"
#include "heap/process_registry.h"

namespace moe::heap {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRetryMs = 5;
constexpr uint64_t kWakeKey = ~uint64_t{0};
constexpr uint64_t kPidfdBit = uint64_t{1} << 32;

MeshAddress make_address() {
  MeshAddress address;
  address.process_token = process_registry::process_token();
  address.mesh_token = random_token();
  struct stat status{};
  if (::stat("/proc/self/ns/net", &status) == 0)
    address.network_namespace = status.st_ino;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  file >> boot_id;
  std::copy_n(boot_id.begin(),
              std::min(boot_id.size(), address.boot_id.size() - 1),
              address.boot_id.begin());
  return address;
}

struct Peer {
  std::unique_ptr<PeerConnection> connection;  ///< null for this rank
  std::unique_ptr<PeerSegments> segments;
  std::mutex memories_mutex;
  std::deque<AnnouncedMemory> memories;  ///< announced, not taken yet
};

/// A peer on this rank's node.
bool shares_memory(const Peer& peer) {
  return peer.connection != nullptr && peer.connection->kind() != PeerConnection::Kind::kRemote;
}

class SocketMesh final : public PeerMesh,
                         public process_registry::ExitListener,
                         public std::enable_shared_from_this<SocketMesh> {
 public:
  explicit SocketMesh(const std::optional<TcpOptions>& tcp) : address_(make_address()) {
    waiting_.unix_socket = listen_abstract(listener_name(address_.mesh_token));
    if (!tcp)
      return;
    const std::vector<IpAddress> found = find_tcp_addresses(*tcp, MeshAddress::kMaxTcpAddresses);
    std::copy(found.begin(), found.end(), address_.tcp_addresses.begin());
    address_.num_tcp_addresses = static_cast<uint16_t>(found.size());
    // Nobody has to reach this port by other ways than these.
    waiting_.tcp_socket =
        listen_tcp(found.size() == 1 ? found.front() : IpAddress{}, &address_.tcp_port);
  }

  ~SocketMesh() override {
    stop();
    if (!origin_.is_forked_child())
      process_registry::forget_segments(address_.mesh_token);
  }

  std::string address() const override {
    origin_.check("PeerMesh");
    return address_.to_bytes();
  }

  void connect(int rank_idx,
               const std::vector<std::string>& addresses,
               const ConnectOptions& options) override;

  int rank_idx() const override { return rank_idx_; }
  int num_ranks() const override { return static_cast<int>(peers_.size()); }

  PeerState state(int rank_idx) const override {
    origin_.check("PeerMesh");
    const Peer& peer = peer_of(rank_idx);
    return peer.connection == nullptr ? PeerState::kAlive : peer.connection->state();
  }

  bool is_link_lost(int rank_idx) const override {
    const Peer& peer = peer_of(rank_idx);
    return peer.connection != nullptr && peer.connection->is_lost();
  }

  void post(int rank_idx, uint64_t channel, uint64_t sequence, std::string payload) override;
  bool take(int rank_idx, uint64_t channel, uint64_t sequence, std::string* payload) override;
  void catch_up() override;
  int add_listener(std::function<void()> on_change) override;
  void remove_listener(int id) override;

  void announce_segment(uint32_t segment_idx,
                        const std::shared_ptr<Segment>& segment,
                        OwnedFd memfd) override;
  void announce_memory(const AnnouncedMemory& memory) override;
  bool take_memory(int rank_idx, AnnouncedMemory* memory) override;
  const SegmentTable::Entry* find_segment(int rank_idx, uint32_t segment_idx) const override {
    return peer_of(rank_idx).segments->find(segment_idx);
  }
  uint64_t peer_segment_bytes() const override {
    uint64_t bytes = 0;
    for (const auto& peer : peers_)
      bytes += peer->segments->bytes();
    return bytes;
  }

  void leave() override { stop(); }
  void on_process_exit() noexcept override {
    try {
      stop();
    } catch (...) {  // the sockets close anyway; there is nobody left to tell
    }
  }

 private:
  const Peer& peer_of(int rank_idx) const {
    MOE_CHECK(rank_idx >= 0 && rank_idx < num_ranks(),
              "rank ",
              rank_idx,
              " is not in [0, ",
              num_ranks(),
              "): not a rank of this mesh, or it is not connected");
    return *peers_[static_cast<size_t>(rank_idx)];
  }
  Peer& peer_of(int rank_idx) { return const_cast<Peer&>(std::as_const(*this).peer_of(rank_idx)); }

  void start_service();
  void stop();
  void wake();

  // Everything below runs on the service thread.
  void serve();
  int next_look_ms() const;
  bool check_links();
  bool handle_event(uint64_t key);
  bool receive_from(int rank_idx, bool has_exited);
  void handle_frame(Peer& peer, const FrameHeader& header, std::string payload, OwnedFd fd);
  PeerConnection::Flush flush_all();
  uint64_t sent_bytes() const;
  bool end_remote_sending();

  ForkOrigin origin_;
  MeshAddress address_;
  Listeners waiting_;  ///< until peers have connected
  int rank_idx_ = -1;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<MeshAddress> addresses_;
  Inbox own_inbox_;
  uint32_t num_announced_ = 0;  ///< guarded by the heap's own lock

  std::mutex stop_mutex_;
  bool is_stopped_ = false;
  std::atomic<bool> is_stopping_{false};
  std::atomic<std::thread::id> service_id_{};
  std::atomic<uint64_t> num_rounds_{0};  ///< rounds in which the service thread read every peer
  OwnedFd epoll_;
  OwnedFd wake_fd_;
  std::unique_ptr<std::thread> service_;
  bool has_remote_ = false;
  double link_timeout_s_ = 0;
  Clock::time_point next_look_{};
  bool has_ended_sending_ = false;  ///< to remote ranks; service thread only

  ListenerList listeners_;
};

void SocketMesh::connect(int rank_idx,
                         const std::vector<std::string>& addresses,
                         const ConnectOptions& options) {
  origin_.check("PeerMesh");
  MOE_CHECK(peers_.empty() && !is_stopped_, "PeerMesh::connect() may be called once");
  const auto num_ranks = static_cast<int>(addresses.size());
  MOE_CHECK(rank_idx >= 0 && rank_idx < num_ranks,
            "rank ",
            rank_idx,
            " is not in [0, ",
            num_ranks,
            "), the ranks that gave an address");
  const int num_local_ranks = options.num_local_ranks == 0 ? num_ranks : options.num_local_ranks;
  MOE_CHECK(num_local_ranks > 0 && num_ranks % num_local_ranks == 0,
            "num_local_ranks must divide the ",
            num_ranks,
            " ranks, got ",
            num_local_ranks);
  const NodeLayout nodes{num_ranks, num_local_ranks};
  addresses_ = parse_addresses(addresses, nodes);
  const MeshAddress& own = addresses_[static_cast<size_t>(rank_idx)];
  MOE_CHECK(own.mesh_token == address_.mesh_token,
            "rank ",
            rank_idx,
            " has another address: ",
            token_text(own.mesh_token),
            " was gathered, this mesh is ",
            token_text(address_.mesh_token));
  std::vector<OwnedFd> sockets = connect_mesh(
      rank_idx, addresses_, nodes, waiting_, options.timeout_s, options.interrupt_check);
  waiting_ = Listeners{};
  rank_idx_ = rank_idx;
  has_remote_ = nodes.num_nodes() > 1;
  link_timeout_s_ = std::max(options.link_timeout_s, kLeastLinkTimeoutS);
  for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank) {
    auto peer = std::make_unique<Peer>();
    peer->segments = std::make_unique<PeerSegments>(
        peer_rank, addresses_[static_cast<size_t>(peer_rank)].mesh_token);
    OwnedFd& socket = sockets[static_cast<size_t>(peer_rank)];
    if (peer_rank != rank_idx) {
      using Kind = PeerConnection::Kind;
      Kind kind = Kind::kProcess;
      if (!nodes.is_same_node(peer_rank, rank_idx))
        kind = Kind::kRemote;
      else if (addresses_[static_cast<size_t>(peer_rank)].process_token == address_.process_token)
        kind = Kind::kThread;
      if (kind == Kind::kRemote)
        prepare_tcp(socket, link_timeout_s_);
      // This process cannot outlive itself: its ranks tell each other by the end of the socket.
      OwnedFd pidfd = kind == Kind::kProcess ? peer_pidfd(socket) : OwnedFd();
      peer->connection =
          std::make_unique<PeerConnection>(std::move(socket), std::move(pidfd), kind);
    }
    peers_.push_back(std::move(peer));
  }
  start_service();
  process_registry::add_exit_listener(weak_from_this());
}

void SocketMesh::start_service() {
  epoll_ = OwnedFd::open([] { return ::epoll_create1(EPOLL_CLOEXEC); });
  wake_fd_ = OwnedFd::open([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!epoll_ || !wake_fd_)
    throw SystemError("epoll_create1 or eventfd failed", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_fd_.get(), &event) != 0)
    throw SystemError("epoll_ctl of the wake descriptor failed", errno);
  for (size_t peer_rank = 0; peer_rank < peers_.size(); ++peer_rank)
    if (peers_[peer_rank]->connection != nullptr)
      peers_[peer_rank]->connection->watch(epoll_.get(), peer_rank, peer_rank | kPidfdBit);
  service_ =
      std::make_unique<std::thread>(start_quiet_thread("hears of peers", [this] { serve(); }));
  pthread_setname_np(service_->native_handle(), "moe-mesh");
}

void SocketMesh::stop() {
  if (origin_.is_forked_child()) {
    // The thread exists in the parent only, and its object may be neither joined nor destroyed.
    static_cast<void>(service_.release());
    return;
  }
  const std::lock_guard lock(stop_mutex_);
  if (is_stopped_)
    return;
  is_stopped_ = true;
  waiting_ = Listeners{};
  if (service_ != nullptr) {
    MOE_CHECK(service_->get_id() != std::this_thread::get_id(),
              "a listener may not make its own mesh leave");
    for (const auto& peer : peers_)
      if (peer->connection != nullptr)
        peer->connection->send({FrameKind::kBye, 0, 0, 0, 0});
    is_stopping_.store(true, std::memory_order_release);
    wake();
    service_->join();
    service_.reset();
  }
  for (const auto& peer : peers_)
    if (peer->connection != nullptr)
      peer->connection->disconnect();
}

void SocketMesh::wake() {
  const uint64_t one = 1;
  // It can only fail by being full, and then the thread is about to wake anyway.
  static_cast<void>(!::write(wake_fd_.get(), &one, sizeof one));
}

void SocketMesh::post(int rank_idx, uint64_t channel, uint64_t sequence, std::string payload) {
  origin_.check("PeerMesh");
  Peer& peer = peer_of(rank_idx);
  MOE_CHECK(payload.size() <= kMaxPayloadBytes,
            "a message may have ",
            kMaxPayloadBytes,
            " bytes, got ",
            payload.size());
  if (peer.connection != nullptr) {
    const FrameHeader header{FrameKind::kMessage, 0, channel, sequence, payload.size()};
    peer.connection->send(header, std::move(payload));
    return;
  }
  own_inbox_.put(channel, sequence, std::move(payload));
  wake();
}

bool SocketMesh::take(int rank_idx, uint64_t channel, uint64_t sequence, std::string* payload) {
  origin_.check("PeerMesh");
  Peer& peer = peer_of(rank_idx);
  Inbox& inbox = peer.connection == nullptr ? own_inbox_ : peer.connection->inbox();
  return inbox.take(channel, sequence, payload);
}

void SocketMesh::catch_up() {
  origin_.check("PeerMesh");
  if (service_id_.load(std::memory_order_relaxed) == std::this_thread::get_id())
    return;
  // A round that is under way may have looked before a message came; the one after it has not.
  const uint64_t wanted = num_rounds_.load(std::memory_order_acquire) + 2;
  const Clock::time_point deadline = Clock::now() + kCatchUpLimit;
  while (num_rounds_.load(std::memory_order_acquire) < wanted && Clock::now() < deadline &&
         !is_stopping_.load(std::memory_order_acquire)) {
    wake();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

int SocketMesh::add_listener(std::function<void()> on_change) {
  origin_.check("PeerMesh");
  return listeners_.add(std::move(on_change));
}

void SocketMesh::remove_listener(int id) {
  if (!origin_.is_forked_child())  // there the lock may be held for ever
    listeners_.remove(id);
}

void SocketMesh::announce_segment(uint32_t segment_idx,
                                  const std::shared_ptr<Segment>& segment,
                                  OwnedFd memfd) {
  origin_.check("PeerMesh");
  MOE_CHECK(num_announced_ == segment_idx,
            "a mesh serves one heap, whose next segment is ",
            num_announced_,
            "; got segment ",
            segment_idx);
  ++num_announced_;
  process_registry::publish_segment(address_.mesh_token, segment_idx, segment);
  const auto shared_fd = std::make_shared<OwnedFd>(std::move(memfd));
  for (const auto& peer : peers_) {
    if (!shares_memory(*peer))
      continue;
    const bool with_fd = peer->connection->kind() == PeerConnection::Kind::kProcess;
    const FrameHeader header{
        FrameKind::kSegment, with_fd ? 1u : 0u, segment_idx, segment->bytes(), 0};
    peer->connection->send(header, "", with_fd ? shared_fd : nullptr);
  }
}

void SocketMesh::announce_memory(const AnnouncedMemory& memory) {
  origin_.check("PeerMesh");
  const FrameHeader header{FrameKind::kMemory,
                           memory.fd == nullptr ? 0u : 1u,
                           memory.segment_idx,
                           memory.bytes,
                           memory.description.size()};
  for (const auto& peer : peers_)
    if (shares_memory(*peer))
      peer->connection->send(header, memory.description, memory.fd);
}

bool SocketMesh::take_memory(int rank_idx, AnnouncedMemory* memory) {
  origin_.check("PeerMesh");
  Peer& peer = peer_of(rank_idx);
  const std::lock_guard lock(peer.memories_mutex);
  if (peer.memories.empty())
    return false;
  *memory = std::move(peer.memories.front());
  peer.memories.pop_front();
  return true;
}

void SocketMesh::serve() {
  service_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  std::vector<epoll_event> events(2 * peers_.size() + 1);  // a round hears everybody
  Clock::time_point flush_deadline{};
  uint64_t flushed_bytes = 0;
  while (true) {
    const bool is_stopping = is_stopping_.load(std::memory_order_acquire);
    int wait_ms = has_remote_ ? next_look_ms() : -1;
    for (const auto& peer : peers_)
      if (peer->segments->has_unmapped_pages())
        wait_ms = 0;
    if (is_stopping)  // the first round looks only, later ones wait for slow readers
      wait_ms = flush_deadline == Clock::time_point{} ? 0 : kRetryMs;
    const int num_events =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
    bool has_changed = false;
    for (int i = 0; i < num_events; ++i)
      has_changed |= handle_event(events[static_cast<size_t>(i)].data.u64);
    num_rounds_.fetch_add(1, std::memory_order_release);
    has_changed |= has_remote_ && check_links();
    const PeerConnection::Flush flushed = flush_all();
    if (flushed == PeerConnection::Flush::kTryLater)  // the socket reports room, but the system has
                                                      // none for now
      std::this_thread::sleep_for(std::chrono::milliseconds(kRetryMs));
    if (has_changed)
      listeners_.call();
    if (is_stopping) {
      const uint64_t sent = sent_bytes();
      if (flush_deadline == Clock::time_point{} || sent != flushed_bytes)
        flush_deadline = Clock::now() + kFlushLimit;
      flushed_bytes = sent;
      const bool is_flushed = flushed == PeerConnection::Flush::kEmpty && end_remote_sending();
      if (is_flushed || Clock::now() >= flush_deadline)
        return;
    }
    for (const auto& peer : peers_)
      peer->segments->map_step();
  }
}

int SocketMesh::next_look_ms() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_look_ - Clock::now());
  return std::max(0, static_cast<int>(left.count()));
}

/// @return Whether a link was found lost.
bool SocketMesh::check_links() {
  if (Clock::now() < next_look_)
    return false;
  const std::chrono::duration<double> interval(std::min(link_timeout_s_ / kLinkLooks, kMostLookS));
  next_look_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(interval);
  bool has_changed = false;
  for (const auto& peer : peers_)
    has_changed |= peer->connection != nullptr && peer->connection->check_link(link_timeout_s_);
  return has_changed;
}

/// @return Whether listeners have to hear of it.
bool SocketMesh::handle_event(uint64_t key) {
  if (key == kWakeKey) {
    uint64_t count = 0;
    static_cast<void>(!::read(wake_fd_.get(), &count, sizeof count));
    return true;
  }
  // A process that has ended has sent all it ever will: a goodbye among it still counts.
  const bool has_exited = (key & kPidfdBit) != 0;
  return receive_from(static_cast<int>(key & ~kPidfdBit), has_exited);
}

bool SocketMesh::receive_from(int rank_idx, bool has_exited) {
  Peer& peer = *peers_[static_cast<size_t>(rank_idx)];
  if (!peer.connection->is_open())
    return false;
  const PeerState state_before = peer.connection->state();
  bool has_changed = false;
  const auto handle = [&](const FrameHeader& header, std::string payload, OwnedFd fd) {
    has_changed = true;
    handle_frame(peer, header, std::move(payload), std::move(fd));
  };
  PeerConnection::Receive received = peer.connection->receive(handle);
  while (has_exited && received == PeerConnection::Receive::kMore)
    received = peer.connection->receive(handle);
  if (has_exited || received == PeerConnection::Receive::kEnded)
    peer.connection->end();
  return has_changed || peer.connection->state() != state_before;
}

void SocketMesh::handle_frame(Peer& peer,
                              const FrameHeader& header,
                              std::string payload,
                              OwnedFd fd) {
  switch (header.kind) {
    case FrameKind::kMessage:
      peer.connection->inbox().put(header.channel, header.sequence, std::move(payload));
      break;
    case FrameKind::kSegment:
      peer.segments->add(static_cast<uint32_t>(header.channel), header.sequence, fd);
      break;
    case FrameKind::kBye:
      peer.connection->mark_left();
      break;
    case FrameKind::kMemory: {
      const std::lock_guard lock(peer.memories_mutex);
      peer.memories.push_back({static_cast<uint32_t>(header.channel),
                               header.sequence,
                               std::move(payload),
                               fd ? std::make_shared<OwnedFd>(std::move(fd)) : nullptr});
      break;
    }
  }
}

/// Flushes all peers, and returns the worst of what is left to send.
PeerConnection::Flush SocketMesh::flush_all() {
  PeerConnection::Flush worst = PeerConnection::Flush::kEmpty;
  for (const auto& peer : peers_)
    if (peer->connection != nullptr)
      worst = std::max(worst, peer->connection->flush());
  return worst;
}

uint64_t SocketMesh::sent_bytes() const {
  uint64_t bytes = 0;
  for (const auto& peer : peers_)
    if (peer->connection != nullptr)
      bytes += peer->connection->sent_bytes();
  return bytes;
}

/// A TCP socket that is closed while its peer still sends drops what is under way to the peer: the
/// goodbye too. So this rank ends its own stream, and reads until the peer, which hears of it, has
/// closed the other.
/// @return Whether all have.
bool SocketMesh::end_remote_sending() {
  bool is_over = true;
  for (const auto& peer : peers_) {
    if (peer->connection == nullptr || shares_memory(*peer) || !peer->connection->is_open())
      continue;
    if (!has_ended_sending_)
      peer->connection->end_sending();
    is_over = false;
  }
  has_ended_sending_ = true;
  return is_over;
}

}  // namespace

std::shared_ptr<PeerMesh> PeerMesh::create(const std::optional<TcpOptions>& tcp) {
  return std::make_shared<SocketMesh>(tcp);
}

}  // namespace moe::heap
