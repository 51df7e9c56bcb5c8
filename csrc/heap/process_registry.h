#pragma once

#include <cstdint>
#include <memory>

#include "heap/memfd_segment.h"
#include "heap/wire.h"

namespace moe::heap {

/// State that the ranks of one process share: their token, their segments by pointer (so that a
/// segment is mapped once per process), and who has to say goodbye when the process exits.
///
/// All under ForkGuard::lock(); a forked child starts with an empty registry and a token of its
/// own.
namespace process_registry {

/// Equal for all ranks of this process, differs in every other.
Token process_token();

void publish_segment(const Token& mesh_token, uint32_t segment_idx, std::weak_ptr<Segment> segment);
std::shared_ptr<Segment> find_segment(const Token& mesh_token, uint32_t segment_idx);
void forget_segments(const Token& mesh_token);

/// Something that leaves when the process exits in good order.
class ExitListener {
 public:
  virtual ~ExitListener() = default;
  virtual void on_process_exit() noexcept = 0;
};

void add_exit_listener(const std::weak_ptr<ExitListener>& listener);

}  // namespace process_registry
}  // namespace moe::heap
