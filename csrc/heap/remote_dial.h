#pragma once

#include <poll.h>

#include <string>
#include <vector>

#include "heap/owned_fd.h"
#include "heap/wire.h"

namespace moe::heap {

/// Dials a peer at all its TCP addresses at once, in rounds: which of them leads there only trying
/// tells.
class RemoteDial {
 public:
  explicit RemoteDial(const MeshAddress& target) : target_(&target) {}

  /// Starts a round; what is left of the last one ends.
  void start();

  /// Sockets of this round that have reached somebody since the last call: the peer, or a process
  /// that has one of its addresses here.
  std::vector<OwnedFd> take_connected();

  /// Returns whether something of this round may still reach somebody.
  bool is_trying() const { return !attempts_.empty(); }
  /// Returns whether nobody listened at any address tried in this round; it has ended.
  bool is_refused() const { return attempts_.empty() && num_tried_ > 0 && num_others_ == 0; }
  /// Somebody hung up who was reached in this round.
  void note_hang_up() { text_ += text_.empty() ? "hung up" : ", hung up"; }

  /// Outcomes by address: "10.0.0.2:4711: no answer, 172.17.0.1:4711: Connection refused".
  std::string text() const;

  void add_polled(std::vector<pollfd>* polled) const;

 private:
  struct Attempt {
    OwnedFd socket;
    std::string where;
  };

  void note_failure(const std::string& where, int error);

  const MeshAddress* target_;
  std::vector<Attempt> attempts_;
  int num_tried_ = 0;
  int num_others_ = 0;  ///< reached somebody, or failed in another way than by a refusal
  std::string text_;
};

}  // namespace moe::heap
