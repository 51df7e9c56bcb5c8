#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace moe {

/// The ranks of equal local index, one a node, and bytes between them: what operations need of the
/// engine that joins nodes.
///
/// One thread of a rank starts transfers at a time; each belongs to the operation that runs. Every
/// pair of ranks has one ordered stream of messages in each direction: the n-th receive() from a
/// node takes the n-th send() of that node's rank to this one, and names the very same size.
class Rail {
 public:
  enum class State { kMoving, kMoved, kFailed };

  /// One message under way. Kept by the caller that started it until it has ended or the rail was
  /// given up.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    /// A thread that sees kMoved sees the bytes as well (acquire).
    virtual State state() const = 0;
    /// Text of what went wrong, after kFailed.
    virtual std::string error() const = 0;
  };

  /// Memory of a message; kept by the rail for as long as the engine may touch it.
  using Buffer = std::shared_ptr<std::byte>;

  virtual ~Rail() = default;

  /// Name of the engine, for messages to people: "gloo", "mpi", "sockets".
  virtual std::string name() const = 0;

  /// Starts to send @p bytes (> 0) from @p offset of @p buffer, which nobody writes until it has
  /// moved. Returns at once.
  virtual std::shared_ptr<Transfer> send(int node_idx,
                                         Buffer buffer,
                                         uint64_t offset,
                                         uint64_t bytes) = 0;

  /// Starts to receive the next message of that node. Returns at once; messages that nobody has
  /// asked for yet wait on the way.
  virtual std::shared_ptr<Transfer> receive(int node_idx,
                                            Buffer buffer,
                                            uint64_t offset,
                                            uint64_t bytes) = 0;

  /// Called whenever a transfer has ended, by any thread; set once, before the first transfer.
  virtual void set_listener(std::function<void()> on_change) = 0;

  /// Ends every transfer that still moves as kFailed; the rail is of no more use. Does not wait for
  /// an engine that cannot be stopped: its memory is kept instead. Idempotent.
  virtual void give_up(const std::string& reason) = 0;

  /// Payload bytes of all transfers that have moved, out of this rank and into it.
  virtual uint64_t sent_bytes() const = 0;
  virtual uint64_t received_bytes() const = 0;
};

}  // namespace moe
